"""Files, headings, `make` targets, commands, options and settings that the pages name exist."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from functools import cache, partial
from pathlib import Path

import pytest

from common.algorithms.registry import ALGORITHMS, entry
from common.config.load import load_settings
from common.config.schema import Settings
from common.errors import ConfigError
from services import worker
from services.cli import app
from services.learner import startup as learner

pytestmark = pytest.mark.wire  # reads files, starts nothing

ROOT = Path(__file__).parents[2]
TEXTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("services/**/README.md")])
FOLDERS = "common|services|docs|tests|presets|benchmarks"
SERVICES = {"learner": learner.parse, **{name: partial(worker.parse, name) for name in worker.SERVICES}}
SETTING = re.compile(rf"({'|'.join(Settings.model_fields)})\.([a-z_]+)(?:[=:].*)?")
FILES = {"key", "key_secret", "md", "py", "yaml"}  # ends of names that begin as a section of settings does
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
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def help_of(*words):
    """Return the output of `rookery WORDS --help`."""
    parse, shown = SERVICES.get(words[0] if words else ""), io.StringIO()
    with pytest.raises(SystemExit) as end, redirect_stdout(shown):
        parse(["--help"], {}) if parse else app.parse_arguments([*words, "--help"])
    assert end.value.code == 0
    return shown.getvalue()


@each_text
def test_every_link_leads_somewhere(text):
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
    for name in re.findall(rf"(?<![\w/.<>-])(?:{FOLDERS})/[\w/.-]*\w(?!\w*[<*{{])", text.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{name} in {text}"


@pytest.mark.parametrize("text", sorted(ROOT.glob("services/**/README.md")), ids=lambda path: path.parent.name)
def test_the_files_in_the_table_of_a_service_are_in_its_folder(text):
    cells = re.findall(r"^\| ([^|]*) \|", text.read_text(encoding="utf-8"), re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([\w/]+\.py)`", cell)]
    assert names
    assert [name for name in names if not (text.parent / name).is_file()] == []


@each_text
def test_every_make_target_that_is_named_exists(text):
    known = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = [line.split()[1] for line in code(text.read_text(encoding="utf-8")) if re.match(r"make [a-z]", line)]
    assert set(named) <= known


@each_text
def test_every_command_and_option_that_is_named_is_known(text):
    for words in commands(text.read_text(encoding="utf-8")):
        command = [word for word in words[:1] if not word.startswith("-")]
        assert set(command) <= set(app.COMMANDS), words
        if command == ["config"] and words[1:2]:
            command = words[:2]
        options = [word for word in words if word.startswith("--")]
        shown = help_of(*command)
        assert all(re.search(rf"{option}\b", shown) for option in options), f"{words} in {text}"


@each_text
def test_every_option_in_a_sentence_is_known_to_some_command(text):
    words = [word for span in spans(text.read_text(encoding="utf-8")) if span.startswith("--") for word in span.split()]
    shown = "".join(help_of(command) for command in app.COMMANDS)
    assert all(re.search(rf"{word}\b", shown) for word in words if word.startswith("--"))


def fields(section):
    """Names of the settings in a section; of `algorithm` those of all algorithms."""
    if section == "algorithm":
        return {name for algorithm in ALGORITHMS for name in entry(algorithm).settings.model_fields}
    return set(Settings.model_fields[section].annotation.model_fields)


@each_text
def test_every_setting_that_is_named_exists(text):
    named = [match for span in spans(text.read_text(encoding="utf-8")) if (match := SETTING.fullmatch(span))]
    assert [match[0] for match in named if match[2] not in fields(match[1]) | FILES] == []


def test_the_settings_of_every_documented_run_are_valid():
    runs = [words for words in commands((ROOT / "README.md").read_text(encoding="utf-8")) if words[:1] == ["train"]]
    tried = [app.parse_arguments(words) for words in runs if not PLACEHOLDER.search(" ".join(words))]
    assert len(tried) > 3
    for run in tried:
        load_settings(preset=(run.names or [None])[0], overrides=run.overrides, environ={})


def test_a_wrong_setting_would_be_seen():
    run = app.parse_arguments(["train", "cartpole", "env.nonsense=1"])
    with pytest.raises(ConfigError):
        load_settings(preset=(run.names or [None])[0], overrides=run.overrides, environ={})


@each_text
def test_no_text_names_a_place_on_the_machine_of_its_author(text):
    assert not re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users|opt|mnt)/", text.read_text(encoding="utf-8"))
