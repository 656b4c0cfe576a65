"""What the texts name is there: files, headings, `make` targets, and commands with their options and settings."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.runtime.config import load
from services.actor import settings as actor
from services.cli import arguments
from services.evaluator import settings as evaluator
from services.learner import settings as learner

pytestmark = pytest.mark.wire  # reads files, starts nothing

ROOT = Path(__file__).parents[2]
TEXTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("services/*/README.md")])
FOLDERS = "common|services|docs|tests|presets|benchmarks"
SERVICES = {"learner": learner.parse, "actor": actor.parse, "evaluator": evaluator.parse}
PLACEHOLDER = re.compile(r"\b(PRESET|DIR|N|S|NAME|HOST|PORT)\b|\.\.\.|my\.yaml|mygames|runs/")

each_text = pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(page):
    """The lines of all fenced blocks."""
    return [line for block in re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL) for line in block.splitlines()]


def spans(page):
    """The inline code outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL))


def code(page):
    """All that a reader may type: lines of blocks without their comments, and inline code."""
    return [line.partition("   #")[0].strip() for line in blocks(page)] + spans(page)


def commands(page):
    """Words after `rookery` of each command line in a page."""
    return [shlex.split(line)[1:] for line in code(page) if re.match(r"rookery( [a-z-]|$)", line)]


def anchor(heading):
    """How GitHub names a heading in a link."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def help_of(words, capsys):
    """What `rookery WORDS --help` prints."""
    parse = SERVICES.get(words[0] if words else "")
    with pytest.raises(SystemExit) as end:
        parse(["--help"], {}) if parse else arguments.parse([*words, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@each_text
def test_every_link_leads_somewhere(text):
    """A file that is moved, or a heading that is renamed, leaves a dead link behind for the next newcomer."""
    page = text.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", page):
        if link.startswith("http"):
            continue
        name, _, heading = link.partition("#")
        target = (text.parent / name).resolve() if name else text
        assert target.exists(), f"{link} in {text}"
        assert target.is_relative_to(ROOT), f"{link} in {text}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in map(anchor, headings), f"{link} in {text}"


@each_text
def test_every_file_that_is_named_exists(text):
    """A path in a sentence is as good as a link. Only the rows that await a benchmark's file may name it before it is there."""
    lines = [line for line in text.read_text(encoding="utf-8").splitlines() if "<!-- results:" not in line]
    for name in re.findall(rf"(?<![\w/.<>-])(?:{FOLDERS})/[\w/.-]*\w(?!\w*[<*{{])", "\n".join(lines)):
        assert (ROOT / name).exists(), f"{name} in {text}"


@each_text
def test_every_make_target_that_is_named_exists(text):
    """The first command a newcomer types is a make target."""
    known = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = [line.split()[1] for line in code(text.read_text(encoding="utf-8")) if re.match(r"make [a-z]", line)]
    assert set(named) <= known


@each_text
def test_every_command_and_option_that_is_named_is_known(text, capsys):
    """A renamed option makes a documented command end with exit code 2."""
    known = {"train", *SERVICES, "config", "presets", "health"}
    for words in commands(text.read_text(encoding="utf-8")):
        command = [word for word in words[:1] if not word.startswith("-")]
        assert set(command) <= known, words
        if command == ["config"] and words[1:2]:
            command = words[:2]
        options = [word for word in words if word.startswith("--")]
        shown = help_of(command, capsys)
        assert all(re.search(rf"{option}\b", shown) for option in options), f"{words} in {text}"


@each_text
def test_every_option_in_a_sentence_is_known_to_some_command(text, capsys):
    """`--resume` may be spoken of without the whole command line."""
    words = [word for span in spans(text.read_text(encoding="utf-8")) if span.startswith("--") for word in span.split()]
    shown = "".join(help_of(command, capsys) for command in (["train"], ["health"], *([name] for name in SERVICES)))
    assert all(re.search(rf"{word}\b", shown) for word in words if word.startswith("--"))


def test_the_settings_of_every_documented_run_are_valid():
    """An example that the configuration refuses is worse than none."""
    runs = [words for words in commands((ROOT / "README.md").read_text(encoding="utf-8")) if words[:1] == ["train"]]
    tried = [arguments.parse(words) for words in runs if not PLACEHOLDER.search(" ".join(words))]
    assert len(tried) > 3
    for run in tried:
        load(preset=run.preset, overrides=run.overrides, environ={})


def test_a_wrong_setting_would_be_seen():
    """The test above must be able to fail."""
    run = arguments.parse(["train", "cartpole", "env.nonsense=1"])
    with pytest.raises(ConfigError):
        load(preset=run.preset, overrides=run.overrides, environ={})


@each_text
def test_no_text_names_a_place_on_the_machine_of_its_author(text):
    """A pasted path of somebody's own machine means nothing to a reader."""
    assert not re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users|opt|mnt)/", text.read_text(encoding="utf-8"))
