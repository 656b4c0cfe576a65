"""`rookery compare` and `rookery report` on runs of two configurations."""

import errno
import html
import json
import os
import re
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from services.cli.app import main
from services.cli.compare import report
from services.cli.compare.runs import configurations, read_runs
from services.cli.compare.statistics import band

pytestmark = pytest.mark.service

LEDGER = {"produced": 1100, "trained": 1000, "queued": 2, "in_flight": 0, "dropped": {"run_ended": 98, "stale": 0}}


@pytest.fixture
def runs(tmp_path, write_run, monkeypatch):
    """Two presets with two seeds each, and a run that has just begun."""
    for name in [name for name in os.environ if name.startswith("ROOKERY_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    for preset in ("cartpole", "cartpole-dqn"):
        for seed in (1, 2):
            write_run(
                tmp_path / "runs" / preset / f"s{seed}",
                f"run.seed={seed}",
                preset=preset,
                command=f"rookery train {preset} --seed {seed} '<b>'",
                curve=[(5, 100, 20 * seed, None), (10, 1000, 480, 490.5)],
                solved=True,
                solved_at={"env_steps": 1000, "wall_seconds": 10.0},
                env_steps=1000,
                wall_seconds=90.0,
                env_steps_per_second=11.6,
                learner_updates=40,
                policy_lag={"mean": 0.5},
                mean100=470.0 + 10 * seed,
                ledger=LEDGER,
            )
    write_run(tmp_path / "runs" / "begun", "env.id=Acrobot-v1")
    return tmp_path / "runs"


class Page(HTMLParser):
    """Collects the attributes that load something, and the text."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.shown = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in {"src", "href", "xlink:href"} and not value.startswith("#")]
        assert tag not in {"script", "link", "b", "img"}

    def handle_data(self, data):
        self.shown.append(data)


def test_a_report_is_one_file_that_loads_nothing(runs, capsys):
    assert main(["report", str(runs), "--out", "out/r.html"]) == 0
    assert "5 runs" in capsys.readouterr().out
    text = (runs.parent / "out" / "r.html").read_text()
    page = Page(text)
    assert page.loads == []
    assert "@import" not in text
    assert "url(http" not in text
    shown = " ".join(" ".join(page.shown).split())
    assert "rookery train cartpole --seed 1 '<b>'" in shown
    assert "1 2 of 2 485 [480, 490] - 1,000 [1,000, 1,000] 1.5 12 0.5" in shown  # the results of a configuration
    assert "1 solved: the target was reached 1 1,000 40 1.5 12 480 - 0.5" in shown  # those of a run
    assert "1 1 1,100 1,000 2 0 98 run_ended 98 0" in shown  # its ledger, in which all env steps are accounted for
    assert "model.layer_norm false (1, 3); true (2)" in shown
    assert "No run on Acrobot-v1 has ended an episode yet." in shown
    assert text.count("<svg") == 1


def test_compare_shows_the_same_values_on_the_terminal(runs, capsys):
    assert main(["compare", str(runs / "cartpole"), str(runs / "cartpole-dqn")]) == 0
    shown = capsys.readouterr().out
    assert (shown.count(" 485 "), shown.count(" [480, 490] ")) == (2, 2)
    assert "2 of 2" in shown
    assert "algorithm.replay_capacity" in shown


def test_a_run_that_was_solved_at_another_target_than_it_has_now_is_not_solved(tmp_path, write_run, capsys):
    reached = {"mean100": 300.0, "evaluation": None}
    for name, target in (("same", "300.0"), ("other", "475.0")):
        ended = {"solved": True, "solved_at": {"env_steps": 900}, "env_steps": 1000, "wall_seconds": 9.0}
        write_run(tmp_path / name, f"target.mean100={target}", target=reached, **ended)
    assert main(["compare", str(tmp_path)]) == 0
    assert {"1 of 1", "0 of 1"} == set(re.findall(r"[01] of 1", capsys.readouterr().out))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    shown = (tmp_path / "r.html").read_text()
    assert (shown.count("solved: the target was reached"), shown.count("not finished")) == (1, 2)


def test_runs_without_a_target_are_neither_solved_nor_unsolved(tmp_path, write_run, capsys):
    none = ("target.mean100=null", "target.evaluation=null", "target.env_steps=1000")
    path = write_run(tmp_path / "run", *none, solved=False, env_steps=1000, wall_seconds=9.0, mean100=7.5)
    assert main(["compare", str(path)]) == 0
    assert re.search(r"^1 +- +7\.5 ", capsys.readouterr().out, re.MULTILINE)
    assert main(["report", str(path), "--out", str(tmp_path / "r.html")]) == 0
    shown = (tmp_path / "r.html").read_text()
    assert ("the budget of env steps is spent" in shown, "not solved" in shown) == (True, False)


@pytest.mark.parametrize(("column", "target", "lines"), [(0, 0, 2), (0, 1, 0), (1, 0, 0), (1, 1, 2)])
def test_a_target_is_drawn_across_the_returns_that_it_is_of(tmp_path, write_run, column, target, lines):
    """Over env steps and over minutes."""
    targets = [f"target.{name}={475.0 if index == target else 'null'}" for index, name in enumerate(("mean100", "evaluation"))]
    curve = [(at, 100 * at, *(at if index == column else None for index in range(2))) for at in (1, 2)]
    groups = configurations(read_runs([write_run(tmp_path / "run", *targets, curve=curve)]))
    assert report.draw_returns(groups).count("stroke-dasharray: ") == lines


def test_curves_their_mean_and_its_interval_are_drawn_over_minutes(tmp_path, write_run):
    for seed in (1, 2):
        write_run(tmp_path / f"s{seed}", f"run.seed={seed}", curve=[(60 * at, 100 * at, 10 * seed, None) for at in (1, 5)])
    axes, (x, _, minutes) = Figure().subplots(), report.X_AXES[1]
    report._draw_bands(axes, configurations(read_runs([tmp_path])), x=x, y=report.ROWS[0][0], unit=minutes, target="")
    assert [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in axes.lines] == [(5, 15), (5, 10), (5, 20)]
    assert axes.collections[0].get_paths()[0].get_extents().extents.tolist() == [1, 10, 5, 20]


@pytest.fixture
def many(tmp_path, write_run, monkeypatch):
    """15 configurations of two seeds each, of which one has reached the target, and one has ended seven episodes alone."""
    monkeypatch.chdir(tmp_path)
    for number in range(15):
        for seed in (1, 2):
            write_run(
                tmp_path / "many" / f"t{number:02}-{seed}",
                f"run.seed={seed}",
                "target.env_steps=98_765",
                f"algorithm.learning_rate={0.001 + number / 1e5:.5f}",
                f"algorithm.gamma={0.9 + number / 1e3:.3f}",
                curve=[(5, 100, 20, None)],
                solved=seed == 1,
                solved_at={"env_steps": 12_345, "wall_seconds": 10.0} if seed == 1 else None,
                env_steps=98_765,
                mean100=123.4 * seed,
                mean100_episodes=100 if seed == 1 else 7,
                environments_unfinished=0 if seed == 1 else 3,
                last_evaluation={"mean": 321.9 * seed},
            )
    return tmp_path / "many"


def test_many_runs_are_compared_within_120_columns(many, capsys):
    """Without a word or a number that is cut in two."""
    assert main(["compare", str(many)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    words = {word for line in lines for word in line.split()}
    assert {"algorithm.learning_rate=0.00114", "algorithm.gamma=0.914", "[321.9,", "643.8]", "12,345"} <= words
    assert sum("algorithm.gamma=" in line for line in lines) == 15


def test_env_steps_to_the_target_say_of_how_many_runs_they_are(many, capsys):
    """A configuration that one run of two has solved may look the fastest."""
    assert main(["compare", str(many)]) == 0
    assert capsys.readouterr().out.count("(by 1 of 2)") == 15


def test_runs_that_have_not_finished_count_only_where_none_has(tmp_path, write_run, capsys):
    """A run that was stopped at a tenth counted in the means of two whole ones, and one that was killed did not."""
    whole = {"env_steps": 1000, "mean100": 500.0, "last_evaluation": {"mean": 500.0}}
    whole |= {"wall_seconds": 60.0, "env_steps_per_second": 17.0, "policy_lag": {"mean": 1.0}}
    stopped, killed = whole | {"env_steps": 100, "mean100": 50.0}, {}
    budget, curve = "target.env_steps=1000", [(1.0, 100, 50.0, None)]
    for epochs, summaries in ((4, (whole, whole, stopped)), (5, (whole, killed, killed)), (6, (stopped, stopped, killed))):
        for seed, summary in enumerate(summaries):
            place = tmp_path / "runs" / f"e{epochs}-{seed}"
            write_run(place, budget, f"run.seed={seed}", f"algorithm.epochs={epochs}", curve=curve, **summary)
    assert main(["compare", str(tmp_path / "runs")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.partition("Results")[2].splitlines()]
    remarks = [" ".join(line) for line in lines]
    for number, mean, unfinished, counted in (("1", "500", 1, 2), ("2", "500", 2, 1), ("3", "50", 3, 2)):
        assert next(line for line in lines if line[:1] == [number])[:5] == [number, "0", "of", "3", mean]
        assert any(f"({unfinished} not finished)" in line or line.count(f"(by {counted} of 3)") == 5 for line in remarks)
    assert sum(line.count("(by 2 of 3)") for line in remarks) == 10
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report.html")]) == 0
    assert re.findall(r", N = ([^<]+)", (tmp_path / "report.html").read_text()) == ["2 of 3", "1 of 3", "3"]


def test_only_a_run_that_reached_its_target_keeps_its_last_return_in_the_mean(tmp_path, write_run, monkeypatch):
    seen = []
    monkeypatch.setattr(report, "band", lambda curves, held: seen.append((curves, held)) or band(curves, held=held))
    ends = ({"solved": True, "env_steps": 500}, {"env_steps": 1000}, {"env_steps": 600})
    for seed, ended in enumerate(ends):
        curve = [(1.0, 100, 50.0, None), (5.0, ended["env_steps"], 480.0, None)]
        write_run(tmp_path / f"s{seed}", f"run.seed={seed}", "target.env_steps=1000", curve=curve, **ended)
    report.render(read_runs([tmp_path]), now=datetime.now().astimezone())
    assert [(x, held) for (x, _), held in zip(*seen[0], strict=True)] == [([100, 500], True), ([100, 1000], False)]


def test_a_summary_of_before_a_resume_is_no_result(tmp_path, write_run, capsys):
    """The run was resumed, and killed 20,000 env steps later."""
    place = write_run(tmp_path / "run", curve=[(1.0, 1000, 2.0, None), (9.0, 21_000, 400.0, None)], env_steps=1000, mean100=2.0)
    assert main(["compare", str(place)]) == 0
    assert "2.0" not in (shown := capsys.readouterr().out)
    assert "1 not finished" in " ".join(shown.split())


def test_a_mean_of_fewer_than_100_episodes_says_so(many, capsys):
    runs = [str(many / name) for name in ("t00-1", "t00-2", "t01-1")]
    assert main(["compare", *runs]) == 0
    shown = capsys.readouterr().out
    assert (shown.count("(of 7 episodes)"), shown.count("(3 environments have ended none)")) == (1, 1)
    assert main(["report", *runs]) == 0
    assert (many.parent / "report.html").read_text().count("(of 7 episodes) (3 environments have ended none)") == 2


def test_an_evaluation_of_an_older_policy_says_so(tmp_path, write_run, capsys):
    """Its games were not over within a minute of the end of the run."""
    for seed, version in ((1, 3), (2, 500), (3, 500)):
        ended = {"last_evaluation": {"mean": 475.0, "version": version}, "version": 500, "env_steps": 1000}
        write_run(tmp_path / f"s{seed}", f"run.seed={seed}", "target.env_steps=1000", **ended)
    assert main(["compare", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("(1 of 3 not of the last policy)") == 1
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").read_text().count("475 (not of the last policy)") == 1


@pytest.mark.parametrize(("seeds", "said"), [(1, ""), (3, ": 73 % over 3"), (7, ": 91 % over 7"), (8, "")])
def test_comparisons_say_what_an_interval_of_few_seeds_is_worth(tmp_path, write_run, capsys, seeds, said):
    for seed in range(seeds):
        write_run(tmp_path / f"s{seed}", f"run.seed={seed}", env_steps=1000, mean100=10.0 * seed)
    assert main(["compare", str(tmp_path)]) == 0
    assert re.findall("less often(.*)", capsys.readouterr().out) == [said] * bool(said)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    assert re.findall("less often(.*?)<", (tmp_path / "r.html").read_text()) == [said] * bool(said)


def test_runs_of_a_series_that_have_not_begun_are_named(tmp_path, write_run, capsys):
    write_run(tmp_path / "series" / "epochs=4-s1", "run.seed=1", "algorithm.epochs=4")
    file = tmp_path / "series" / "series.json"
    file.write_text(json.dumps({"grid": {"algorithm.epochs": ["4", "8"]}, "seeds": [1, 2]}))
    note = f"3 of the 4 runs of the series {file.parent} have not begun: epochs=4-s2, epochs=8-s1, epochs=8-s2"
    assert main(["compare", str(tmp_path)]) == 0
    assert note in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    assert note in html.unescape((tmp_path / "r.html").read_text())
    for text in ("[1]", "{", '{"grid": {"a": 3}, "seeds": [1]}'):  # the run can be compared all the same
        file.write_text(text)
        assert main(["compare", str(tmp_path)]) == 0
        assert "begun" not in capsys.readouterr().out


def test_a_run_that_was_resumed_with_other_settings_says_so(tmp_path, write_run, capsys):
    """By its last settings it is of this configuration, and half of it had others."""
    change = "algorithm.learning_rate was 0.001, is 1e-05"
    write_run(tmp_path / "runs" / "s2", "run.seed=2", env_steps=20_000)
    killed = write_run(tmp_path / "runs" / "s1", "run.seed=1")  # before it wrote a summary
    (killed / "settings_changed.json").write_text(json.dumps([{"env_steps": 12_159, "settings": [change]}]))
    earlier = write_run(tmp_path / "runs" / "s3", "run.seed=3")
    (earlier / "settings_changed.json").write_text(json.dumps([{"env_steps": 9_000, "settings": [change]}]))
    remark = f"(changed at a resume: {change} from"
    assert main(["compare", str(tmp_path / "runs")]) == 0
    assert f"cartpole {remark} 9,000 to 12,159 env steps on, in 2 of 3 runs)" in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "r.html")]) == 0
    shown = (tmp_path / "r.html").read_text()
    assert shown.count(remark) == 3
    assert all(f"{remark} {env_steps} env steps on)" in shown for env_steps in ("9,000", "12,159"))


def test_a_run_and_its_copy_are_one_run(tmp_path, write_run, monkeypatch, capsys):
    """Two runs were shown as three, with too narrow an interval; of both the directory is the newer one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for seed, folder, score in ((1, "runs", 400.0), (1, "store", 12.34), (2, "runs", 400.0)):
        write_run(tmp_path / folder / f"s{seed}", f"run.seed={seed}", "run.id=same", env_steps=20_000, mean100=score)
    assert main(["compare", f"file://{tmp_path}/store/s1", str(tmp_path / "runs")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "0 of 2" in shown
    assert "12.3" not in shown  # a point is in no hash of the cache


def test_a_run_and_its_backup_are_one_run_and_equal_seeds_are_named(tmp_path, write_run, capsys):
    """Two runs and their backup were three seeds."""
    at = {"mine": 3.1, "mine-backup": 3.1, "again": 4.0, "two": 3.5}  # seconds at the first point
    for name, seconds in at.items():
        rows = [(seconds, 100, 20, None), (9.0, 200, 30, None)][: 1 if name == "mine" else 2]
        write_run(tmp_path / name, f"run.seed={1 + (name == 'two')}", "run.id=same", curve=rows, env_steps=200, mean100=400.0)
    assert main(["compare", str(tmp_path / "mine"), str(tmp_path / "mine-backup"), str(tmp_path / "two")]) == 0
    shown = " ".join((out := capsys.readouterr().out).split())
    assert "0 of 2" in shown
    assert f"left out, as copies of {tmp_path / 'mine-backup'}: {tmp_path / 'mine'}\n" in out  # which has fewer points
    assert "different seeds" not in shown
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    shown = html.unescape((tmp_path / "r.html").read_text())
    assert "configuration 1: 3 runs have only 2 different seeds" in shown  # `again` began with the config.yaml of `mine`
    assert f"left out, as copies of {tmp_path / 'mine-backup'}: {tmp_path / 'mine'}<" in shown


def test_a_copy_is_left_out_by_how_far_it_got_and_a_fork_is_another_run(tmp_path, write_run, capsys):
    """A resume removes the points after its checkpoint, so a run that was solved may have fewer than a backup of before."""
    points = [(1.0, 100, 20.0, None), (2.0, 200, 30.0, None), (3.0, 300, 40.0, None)]
    ended = {"env_steps": 400, "mean100": 475.0, "solved_at": {"env_steps": 400}, "solved": True}
    write_run(tmp_path / "a-backup", "run.id=same", curve=points)
    write_run(tmp_path / "b-solved", "run.id=same", curve=points[:2], **ended)
    write_run(tmp_path / "c-at-once", "run.id=same")
    write_run(tmp_path / "d-fork", "run.id=same", "algorithm.epochs=9", curve=points, **ended)
    assert main(["compare", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    left_out = f"left out, as copies of {tmp_path / 'b-solved'}: {tmp_path / 'a-backup'}, {tmp_path / 'c-at-once'}\n"
    assert out.count("left out") == out.count(left_out) == 1
    assert out.count("1 of 1") == 2


def test_a_report_has_names_and_values_of_any_characters(tmp_path, write_run, capsys):
    """Text between two $ is no formula, and a name may be no UTF-8: both ended in a traceback."""
    for name in (os.fsdecode(b"r\xff"), "r"):
        write_run(tmp_path / name, f"env.kwargs={{a: '$x_{{$', b: {name[:1] == name}}}", curve=[(1.0, 100, 20.0, None)])
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    assert text.count("env.kwargs.b=True") == 2  # in a table, and in the legend
    assert "r?</" in text


def test_curves_without_a_common_range_are_counted(tmp_path, write_run):
    """Runs of one point each, whose budgets ended some env steps apart: the legend had N = 0."""
    for seed in range(3):
        curve, ended = [(1.0, 1000 + 4 * seed, 20.0, None)], {"env_steps": 1000 + 4 * seed, "mean100": 20.0}
        write_run(tmp_path / f"s{seed}", f"run.seed={seed}", "target.env_steps=1000", curve=curve, **ended)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    assert "N = 3, without a common range" in (tmp_path / "r.html").read_text()


def test_the_names_of_the_configurations_stand_below_the_plots(many):
    """Within the plots long names covered the curves, or squeezed them."""
    assert main(["report", str(many)]) == 0
    figure = (many.parent / "report.html").read_text().partition("<svg")[2].partition("</svg>")[0]
    assert figure.rindex("wall-clock minutes") < figure.index("1. cartpole")


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["compare"], "RUN"), (["report", "nowhere"], "no run in nowhere"), (["report", ".", "--out", "/proc/x/r.html"], "--out")],
)
def test_bad_input_is_one_line_and_exit_code_2(runs, words, hint, capsys):
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert hint in err


@pytest.mark.parametrize("out", ["", ".", "runs/"])
def test_a_directory_as_the_file_is_refused_before_anything_is_drawn(runs, out, capsys, monkeypatch):
    monkeypatch.setattr(report, "render", None)
    assert main(["report", str(runs / "begun"), "--out", out]) == 2
    fact = "cannot be written: found a directory, wanted a file; set --out to one"
    assert capsys.readouterr().err == f"rookery report: error: {out.rstrip('/') or '.'} {fact}\n"


@pytest.mark.parametrize("words", [["report", "--out"], ["export"]])
def test_a_device_or_pipe_is_refused_and_stays_what_it_is(words, runs, capsys):
    os.mkfifo("pipe")
    assert main([words[0], str(runs / "begun"), *words[1:], "pipe"]) == 2
    assert "pipe cannot be written: found a device or pipe, wanted a file" in capsys.readouterr().err
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize("words", [["compare"], ["report", "--out", "report.html"]])
def test_folders_that_may_not_be_entered_are_named(words, runs, write_run, monkeypatch, capsys):
    """`link` leads into a folder of that kind: the system refuses its status too."""
    for name in ("locked", "link"):
        write_run(runs / name / "s1")
    stat = Path.stat

    def refuses(path, **options):
        if "locked" in path.parent.parts or "link" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuses)
    assert main([words[0], "runs", *words[1:]]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"rookery {words[0]}: warning: runs/{name} may not be entered: runs in it are left out" for name in ("link", "locked")
    ]
    assert "5 runs" in out or out.count("of 2") == 2
