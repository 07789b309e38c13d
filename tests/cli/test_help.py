"""``--help`` fits a screen: the options that most people use, and a page for each topic."""

from typing import Any

import pytest

from memplan.cli.commands import COMMANDS
from memplan.cli.with_typer.app import load_command
from memplan.cli.with_typer.help_pages import COMMON, TOPICS, topics_of

SCREEN_LINES, SCREEN_COLUMNS = 45, 80
PAGES = [
    (name, topic) for name in COMMANDS for topic in ("", *topics_of(load_command(name).params))
]


@pytest.mark.parametrize(("name", "topic"), PAGES)
def test_a_page_fits_a_screen(
    run: Any, monkeypatch: pytest.MonkeyPatch, name: str, topic: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(SCREEN_COLUMNS))
    outcome = run(name, "--help", *([topic] if topic else []))
    lines = outcome.stdout.splitlines()
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert lines[0].startswith(f"Usage: memplan {name}")
    assert 5 < len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS


def test_the_list_of_commands_fits_a_screen(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(SCREEN_COLUMNS))
    assert len(run("--help").stdout.splitlines()) <= SCREEN_LINES


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_on_a_page(run: Any, name: str) -> None:
    params = load_command(name).params
    shown = {option for options in topics_of(params).values() for option in options}
    everything = run(name, "--help", "all").stdout
    for param in params:
        if name in COMMON and param.param_type_name == "option":
            assert param in shown, param.name
        if param.param_type_name == "option":
            assert all(each in everything for each in param.opts)


@pytest.mark.parametrize("name", COMMON)
def test_the_first_page_names_options_that_there_are(run: Any, name: str) -> None:
    known = {each for param in load_command(name).params for each in param.opts}
    named = [option.split()[0] for group in COMMON[name] for option in group.options]
    assert set(named) <= known
    assert len(set(named)) == len(named)
    assert 5 <= len(named) <= 13
    assert 2 <= len(COMMON[name]) <= 3
    page = run(name, "--help").stdout
    for group in COMMON[name]:
        assert f"$ memplan {group.example}" in page
        words = [word for word in group.example.split() if word.startswith("--")]
        assert set(words) <= known
    for topic, options in topics_of(load_command(name).params).items():
        assert f"{topic} ({len(options)})" in " ".join(page.split())


def test_topics_have_a_word_of_their_own() -> None:
    assert len(set(TOPICS.values())) == len(TOPICS)
    assert all(word.isalpha() and word.islower() for word in TOPICS.values())


def test_a_topic_that_is_nearly_one_is_refused(run: Any) -> None:
    outcome = run("estimate", "--help", "paralel")
    assert outcome.exit_code == 2
    assert "--help: there is no topic 'paralel'. Did you mean 'parallel'?" in outcome.stderr


def test_help_behind_a_model_is_the_first_page(run: Any) -> None:
    assert run("estimate", "--help", "t5-3b").stdout == run("estimate", "--help").stdout
    assert run("estimate", "t5-3b", "-h").stdout == run("estimate", "--help").stdout
