"""A container that cannot start logs one line and exits with a code that the orchestrator shows."""

from __future__ import annotations

import uuid

import pytest

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]


@pytest.fixture
def run(engine, images):
    """Run an image, hardened as in compose; return exit code and output."""

    def call(image, *words, options=()):
        hardened = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
        done = engine("docker", "run", "--rm", *hardened, *options, f"rookery-{image}:{images}", *words, check=False)
        return done.returncode, [line for line in (done.stdout + done.stderr).splitlines() if "error:" in line], done

    return call


LEARNER = ("learner", "--config", "pong", "--run-dir", "/var/lib/rookery/run", "--resume-if-found", "--linger")


@pytest.mark.parametrize(
    ("options", "words", "says"),
    [
        ((), ("learner", "--config", "pogn"), ["'pogn'", "did you mean pong?"]),
        ((), ("learner", "--config", "/etc/rookery/mine.yaml"), ["/etc/rookery/mine.yaml", "wanted a readable YAML file"]),
        (("--env", "ROOKERY_ENV__NUM_ENV=4"), LEARNER, ["env.num_env", "did you mean num_envs?"]),
        (("--tmpfs", "/var/lib/rookery:mode=0755,uid=0"), LEARNER, ["run directory cannot be written", "set run.dir"]),
        (("--tmpfs", "/var/lib/rookery:mode=0700,uid=0"), LEARNER, ["run directory cannot be written", "set run.dir"]),
        (
            ("--memory", "1g"),
            ("learner", "--config", "pong-dqn", "algorithm.replay_capacity=1000000"),
            ["replay memory", "larger than what is free here", "lower algorithm.replay_capacity"],
        ),
        (
            ("--env", "ROOKERY_LEARNER__BIND=tcp://0.0.0.0:5700"),
            LEARNER,
            ["learner.bind", "`rookery keys`", "learner.insecure=true"],
        ),
        (
            ("--env", "ROOKERY_LEARNER__KEYS=/etc/rookery-keys"),
            LEARNER,
            ["/etc/rookery-keys/learner.key_secret", "`rookery keys"],
        ),
        (("--env", "ROOKERY_METRICS__HOST=192.0.2.1"), LEARNER, ["192.0.2.1:9100", "set metrics.host and metrics.port"]),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(run, options, words, says):
    code, errors, done = run("learner", *words, options=options)
    assert (code, len(errors)) == (2, 1), done.stdout + done.stderr
    for word in says:
        assert word in errors[0]
    assert "Traceback" not in done.stdout + done.stderr


def test_an_actor_without_a_learner_waits_says_so_and_is_healthy(engine, images, wait):
    name = f"rookery-test-{uuid.uuid4().hex[:8]}"
    words = "actor", "--learner", "tcp://nobody.invalid:5700", "--insecure"
    engine("docker", "run", "--detach", "--name", name, f"rookery-actor:{images}", *words)
    try:
        wait(lambda: "no_learner_yet" in engine("docker", "logs", name).stderr, "it says that it waits")
        assert engine("docker", "exec", name, "rookery", "health").stdout == "ok\n"
        unready = engine("docker", "exec", name, "rookery", "health", "--ready", check=False)
        assert (unready.returncode, unready.stdout) == (1, "starting\n")
        engine("docker", "stop", "--time", "10", name)
        state = engine("docker", "inspect", "--format", "{{.State.ExitCode}} {{.RestartCount}}", name).stdout
        assert state.split() == ["0", "0"]
    finally:
        engine("docker", "rm", "--force", name, check=False)


def test_the_images_are_labelled_and_small_enough(engine, images):
    for image in ("actor", "learner"):
        found = engine("docker", "inspect", "--format", "{{json .Config}}", f"rookery-{image}:{images}").stdout
        assert f'"org.opencontainers.image.version":"{images}"' in found
        assert '"org.opencontainers.image.revision"' in found
        assert '"Entrypoint":["rookery"]' in found
    listed = "import torch, importlib.util as u; print(torch.version.cuda, u.find_spec('tensorboard'), u.find_spec('matplotlib'))"
    words = ("docker", "run", "--rm", "--entrypoint", "python", f"rookery-actor:{images}", "-c", listed)
    assert engine(*words).stdout.split() == ["None", "None", "None"]
