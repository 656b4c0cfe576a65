"""The comparison of the two ways of A3C: its bytes are what is sent, and its crossovers follow from its rows."""

import json

import pytest

from benchmarks.a3c import LADDER, PRESETS, Row, Traffic, crossovers, measure, page, solved, table, traffic
from benchmarks.learning import fingerprint
from benchmarks.pipeline import Window
from common.observability.deployment import LEARNER

SMALL = LADDER["pong x 1/4"]


def a_row(preset: str, *, up: float, speed: float, network: str = "net") -> Row:
    """A run of one second."""
    growth = {
        "rookery_learner_env_steps_trained_total": speed,
        "rookery_learner_message_bytes_received_total": up * speed,
        "rookery_learner_message_bytes_sent_total": 8.0 * speed,
        "process_cpu_seconds_total": 1.0,
        "rookery_learner_policy_lag_versions_sum": 30.0,
        "rookery_learner_policy_lag_versions_count": 20.0,
    }
    sizes = Traffic(parameters=512, up=up, down=8.0, rows=256)
    return Row(network=network, preset=preset, traffic=sizes, window=Window(seconds=1.0, growth={LEARNER: growth}))


@pytest.mark.pure
def test_a_gradient_is_as_large_as_the_network_and_a_rollout_as_its_frames() -> None:
    """By hand: 8 games for 64 env steps of 42x42 frames, and what stands beside each frame is less than a tenth of it."""
    data, gradient = (traffic(preset, SMALL) for preset in PRESETS)
    assert (data.rows, gradient.rows) == (512, 512)
    assert data.parameters == gradient.parameters
    assert gradient.up == pytest.approx(4 * gradient.parameters / 512, rel=0.001)
    assert gradient.down == data.down == 2 * 4 * data.parameters / 512  # two actors, an update for each rollout
    assert 67 / 64 * 42 * 42 < data.up < 1.1 * 68 / 64 * 42 * 42
    assert traffic(PRESETS[1], (*SMALL, "algorithm.gradient_precision=bf16")).up == pytest.approx(gradient.up / 2, rel=0.001)


@pytest.mark.pure
def test_the_networks_on_either_side_of_the_crossover_are_named() -> None:
    """Gradients are smaller with the small network and cheaper to compute with the large one."""
    rows = [a_row(PRESETS[0], up=100.0, speed=900.0, network=name) for name in ("small", "large")]
    rows += [
        a_row(PRESETS[1], up=10.0, speed=800.0, network="small"),
        a_row(PRESETS[1], up=900.0, speed=1_000.0, network="large"),
    ]
    computed, fewer, cheaper = crossovers(rows)
    assert "25,600 bytes" in computed
    assert "6,400 parameters in float32, 12,800 in bfloat16" in computed
    assert fewer.endswith("fewer bytes with small.")
    assert cheaper.endswith("less core time with large.")


@pytest.mark.pure
def test_the_page_holds_all_that_was_counted(tmp_path) -> None:
    """Bytes per env step, speed and lag in the table; times of all runs of the present preset, the newest of each seed."""
    learning = tmp_path / "learning.jsonl"
    of = {"preset": PRESETS[0], "overrides": [], "env_steps": 10_000, "wall_seconds": 600.0, "solved_at": {"env_steps": 1}}
    own = {"settings": fingerprint(PRESETS[0])}
    runs = [
        own | {"seed": 1, "wall_seconds": 1.0},
        own | {"seed": 1},
        own | {"seed": 2, "solved_at": None},
        {"settings": "", "seed": 3},
    ]
    learning.write_text("\n".join(json.dumps(of | run) for run in runs))
    first, second = solved(learning)
    assert first.endswith("target: seed 1 10 k env steps in 10.0 minutes; seed 2 10 k env steps in 10.0 minutes, not solved.")
    assert second == f"- `{PRESETS[1]}` to its target: not run."
    rows = [a_row(PRESETS[0], up=100.0, speed=900.0)]
    assert table(rows)[-1] == "| net | 512 | data | 100 | 100 | 8 | 8 | 1,111 us | 900 | 1.50 |"
    text = page(rows, seconds=1.0, load_before=0.0, learning=learning)
    assert table(rows)[-1] in text
    assert "10.0 minutes" in text


@pytest.mark.system
def test_a_run_is_counted_by_its_own_learner(least) -> None:
    """Real processes: what the learner received per message is what the sizes say, headers aside."""
    with least(1_000):  # more messages than can wait: two actors with a credit each
        row = measure("small", PRESETS[1], (*SMALL, "env.num_envs=4"), seconds=0.0)
    growth = row.window.growth[LEARNER]
    message = growth["rookery_learner_message_bytes_received_total"] / growth["rookery_learner_messages_received_total/gradient"]
    assert message == pytest.approx(row.traffic.up * row.traffic.rows, rel=0.05)
    assert row.up > 0.0
    assert row.lag >= 0.0
