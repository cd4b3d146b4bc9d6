"""rlwatch.toml: found, read, refused with everything that is wrong with it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, replace
from datetime import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.alerts.config import ChannelConfig, Config, build_notifiers, default_toml, load_config, rule_toml
from rlwatch.alerts.rules import AlertingConfig, QuietHours, Rule, builtin_kinds, default_rules
from rlwatch.alerts.schema import RuleTable, parse
from rlwatch.errors import ConfigError, MissingExtraError

URL, SECRET = "https://hooks.example.com/services/hush-hush", "hush-hush-secret"
FULL = """
[store]
url = "/data/runs"

[dashboard]
url = "http://host:8501"

[notify.webhook]
url = "env:MY_URL"
secret = "env:MY_SECRET"
total_s = 3

[notify.oncall]
kind = "webhook"
url = "https://pager.example.com/hush-hush"

[[rules]]
name = "kl"
kinds = ["kl_drift"]
for_steps = 50
channels = ["oncall"]

[[rules]]
name = "mine"
severity = "critical"
labels = { team = "rl" }
"""


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("RLWATCH_WEBHOOK_URL", "RLWATCH_WEBHOOK_SECRET"):
        monkeypatch.delenv(variable, raising=False)


def written(text: str, path: str = "rlwatch.toml") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_without_a_file_the_defaults_apply():
    """Default rules, the console, nothing else."""
    config = load_config()

    assert config == Config()
    assert (config.rules, config.channel_names, list(build_notifiers(config))) == (
        default_rules(),
        ("console",),
        ["console"],
    )


def test_a_file_says_all_there_is_to_say():
    """Rules, channels, places."""
    written(FULL)
    config = load_config()
    rules = {rule.name: rule for rule in config.rules}

    assert rules["kl"] == Rule("kl", kinds=("kl_drift",), for_steps=50, channels=("oncall",))
    assert rules["mine"] == Rule("mine", severity="critical", labels={"team": "rl"})
    assert [r.name for r in config.rules] == [*(r.name for r in default_rules()), "mine"]
    assert config.channel_names == ("console", "webhook", "oncall")
    assert (config.store_url, config.dashboard_url, config.path) == (
        "/data/runs",
        "http://host:8501",
        Path("rlwatch.toml"),
    )


def test_default_rules_can_be_left_out():
    """Then only the file's apply."""
    written('default_rules = false\n[[rules]]\nname = "mine"\n')

    assert [r.name for r in load_config().rules] == ["mine"]


def test_the_path_given_wins_over_the_working_directory_and_that_over_the_store(tmp_path: Path):
    """One file applies, never a mixture."""
    one = 'default_rules = false\n[[rules]]\nname = "{}"\n'
    written(one.format("store"), "runs/rlwatch.toml")
    from_store = [rule.name for rule in load_config(store_root="runs").rules]
    written(one.format("here"))
    found = [load_config(store_root="runs").rules[0].name]
    written(one.format("given"), "elsewhere/my.toml")
    found.append(load_config("elsewhere/my.toml", store_root="runs").rules[0].name)

    found.append(load_config(store_root="runs", env={"RLWATCH_CONFIG": "elsewhere/my.toml"}).rules[0].name)

    assert found == ["here", "given", "given"]
    assert "store" in from_store


def test_a_path_given_must_exist():
    """Silently taking the defaults would be a surprise."""
    with pytest.raises(ConfigError, match=r"'no\.toml'.*rules init"):
        load_config("no.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour = 1", "colour: unknown key; known keys: default_rules, rules"),
        ("rulez = []", "rulez: unknown key; did you mean 'rules'?"),
        ('[[rules]]\nname = "a"\nfor_stepz = 3', "rules[0].for_stepz: unknown key; did you mean 'for_steps'?"),
        ('[notify.webhook]\nadress = "hush"', "notify.webhook.adress: unknown key; known keys: kind, url"),
        ('[store]\npath = "x"\nurl = "y"', "store.path: unknown key; known keys: url"),
        ("[store]", "store.url: missing"),
        ("[[rules]]", "rules[0].name: missing"),
        ('[[rules]]\nname = "a"\nfor_steps = "3"', "rules[0].for_steps: Input should be a valid integer, got '3'"),
        (
            '[[rules]]\nname = "a"\nfor_steps = -3',
            "rules[0]: rule 'a': for_steps must be a number of steps >= 0, got -3",
        ),
        ('[[rules]]\nname = "a"\nmin_severity = "bad"', "got 'bad'"),
        ('[[rules]]\nname = "a"\n[[rules]]\nname = "a"', "rules: more than one is named 'a'"),
        (
            '[[rules]]\nname = "a"\nchannels = ["pager"]',
            "rules[0].channels: there is no channel 'pager'; add [notify.pager]",
        ),
        ("[notify.pager]", "notify.pager: there is no kind 'pager'; set kind to one of command, console"),
        ('[notify.webhook]\nsecret = "hush"', "notify.webhook.secret: must name an environment variable, as in 'env:"),
        ('[notify.webhook]\nurl = ["hush"]', "notify.webhook.url: Input should be a valid string"),
        ("[notify.webhook]\ntotal_s = 0", "notify.webhook.total_s: Input should be greater than 0"),
        ("[notify.webhook]\ntotal_s = nan", "notify.webhook.total_s: Input should be greater than 0"),
        ("notify = 3", "notify: Input should be a valid dictionary"),
        ("a = ", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_key_and_without_secrets(text: str, said: str):
    """So that the next try is right."""
    written(text)
    with pytest.raises(ConfigError) as error:
        load_config()

    assert said in str(error.value)
    assert str(error.value).startswith("rlwatch.toml")
    assert "hush" not in str(error.value)


def test_all_problems_are_listed_at_once():
    """Not one a run."""
    written('[[rules]]\nname = "a"\nfor_stepz = 3\n[store]\nurll = "x"\n')
    with pytest.raises(ConfigError) as error:
        load_config()

    assert str(error.value).splitlines()[0] == "rlwatch.toml: 3 problems"
    assert {line.strip().split(":")[0] for line in str(error.value).splitlines()[1:]} == {
        "rules[0].for_stepz",
        "store.urll",
        "store.url",
    }


def test_a_file_that_is_no_text_is_refused():
    """With its name."""
    Path("rlwatch.toml").write_bytes(b"\xff\xfe")

    with pytest.raises(ConfigError, match=r"rlwatch\.toml is not valid TOML"):
        load_config()


def test_a_kind_nothing_reports_is_a_warning_for_it_may_be_ones_own_detector():
    """Said, not refused."""
    written('[[rules]]\nname = "mine"\nkinds = ["kl_drifft"]\n')

    [warning] = load_config().warnings
    assert "'kl_drifft'" in warning
    assert "did you mean 'kl_drift'" in warning


def test_secrets_are_read_from_the_environment_when_notifiers_are_built():
    """Not before: a machine without them can still read the rules."""
    written(FULL)
    config = load_config()
    notifiers = build_notifiers(config, env={"MY_URL": URL, "MY_SECRET": SECRET})

    assert sorted(notifiers) == ["console", "oncall", "webhook"]
    assert repr(notifiers["webhook"]).endswith("url='https://hooks.example.com/[redacted]', signed=True)")
    with pytest.raises(ConfigError, match=r"rlwatch\.toml: notify\.webhook\.url .*'MY_URL'.*not set"):
        build_notifiers(config, env={})


def test_the_environment_alone_makes_a_webhook():
    """No file needed; without a secret it is unsigned."""
    signed = load_config(env={"RLWATCH_WEBHOOK_URL": URL, "RLWATCH_WEBHOOK_SECRET": SECRET})
    unsigned = load_config(env={"RLWATCH_WEBHOOK_URL": URL})

    assert signed.channel_names == ("console", "webhook")
    assert [repr(build_notifiers(c)["webhook"])[-12:-1] for c in (signed, unsigned)] == ["signed=True", "igned=False"]
    assert load_config(env={"RLWATCH_WEBHOOK_URL": "", "RLWATCH_WEBHOOK_SECRET": SECRET}).channel_names == ("console",)


def test_the_environment_wins_over_the_files_address_and_keeps_its_other_settings():
    """One channel 'webhook', not two."""
    written(FULL)
    config = load_config(env={"RLWATCH_WEBHOOK_URL": URL})
    options = {c.name: c.options for c in config.channels}["webhook"]

    assert (options["url"], options["secret"], options["total_s"]) == (URL, "env:MY_SECRET", 3)
    assert sorted(config.channel_names) == ["console", "oncall", "webhook"]


def test_an_address_in_code_is_a_webhook_too():
    """As in ``init(webhook_url=...)``."""
    env = {"RLWATCH_WEBHOOK_URL": "https://other.example.com", "RLWATCH_WEBHOOK_SECRET": SECRET}
    [webhook] = build_notifiers(load_config(webhook_url=URL, env=env), console=False).values()

    assert webhook.name == "webhook"
    assert repr(webhook).endswith("url='https://hooks.example.com/[redacted]', signed=True)")


def test_no_repr_shows_an_address_or_a_secret():
    """Configurations end up in logs."""
    written(FULL)
    shown = repr(load_config().with_webhook(URL, SECRET))

    assert "hush" not in shown
    assert "ChannelConfig(name='webhook', kind='webhook')" in shown


def test_wrong_settings_of_a_notifier_are_refused_at_building():
    """A console has no address."""
    config = Config(channels=(ChannelConfig("c", "console", {"url": URL}),))

    with pytest.raises(ConfigError, match=r"'c'.*\['url'\]"):
        build_notifiers(config)


def test_the_written_file_gives_the_default_rules():
    """``rules init`` changes nothing until it is edited."""
    written(default_toml())
    config = load_config()

    assert (config.policy, config.channel_names, config.warnings) == (AlertingConfig(), ("console",), ())


def test_what_the_written_file_comments_out_is_correct_too():
    """Whoever uncomments it gets what it says."""
    text = "\n".join(line[2:] if re.match(r"# (\[|\w+ = )", line) else line for line in default_toml().splitlines())
    written(text)
    config = load_config()

    assert config.channel_names == ("console", "webhook", "oncall", "slack", "pager")
    assert config.store_url == "./rlwatch-runs"
    assert replace(config.policy, quiet_hours=()) == replace(AlertingConfig(), forecast=False)
    assert config.policy.quiet_hours == (QuietHours(time(22), time(7), "Europe/Berlin"),)


def test_the_file_knows_every_field_of_a_rule():
    """A new one must not be forgotten."""
    assert set(RuleTable.model_fields) == {field.name for field in fields(Rule)}


names = st.text(min_size=1).filter(str.strip)
some_rules = st.builds(
    lambda for_steps, **more: Rule("r", for_steps=for_steps, **more),
    kinds=st.lists(st.sampled_from(builtin_kinds())),
    min_severity=st.sampled_from(["info", "warning", "critical"]),
    for_steps=st.integers(0, 100),
    severity=st.none() | st.sampled_from(["info", "critical"]),
    labels=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\x7f")),
        st.text(st.characters(codec="utf-8", exclude_characters="\x7f")),
    ),
    channels=st.lists(st.sampled_from(["console", "webhook"])),
    repeat_minutes=st.floats(0, 1e6) | st.integers(0, 600),
    escalate_after_minutes=st.floats(0.1, 1e4),
    escalate_after_steps=st.integers(0, 100),
    escalate_to=st.lists(st.just("webhook")),
    escalate_severity=st.sampled_from(["warning", "critical"]),
    only_live=st.booleans(),
)


@given(some_rules)
def test_any_rule_survives_being_written_and_read(rule: Rule):
    """The writer and the reader agree."""
    import tomllib

    assert parse("f", tomllib.loads(rule_toml(rule))).policy.rules == (rule,)


def test_without_pydantic_there_is_only_no_file(monkeypatch: pytest.MonkeyPatch):
    """A trainer's small install works; with a file it says what to install."""
    monkeypatch.delitem(sys.modules, "rlwatch.alerts.schema", raising=False)
    monkeypatch.setitem(sys.modules, "pydantic", None)

    assert load_config(env={"RLWATCH_WEBHOOK_URL": URL}).channel_names == ("console", "webhook")
    written("")
    with pytest.raises(MissingExtraError, match=r"reading rlwatch\.toml.*\[alerts\]"):
        load_config()


def test_the_rooms_import_without_any_extra():
    """In a fresh process: no pydantic, httpx or tenacity until they are needed."""
    script = (
        "import sys; import rlwatch.alerts.config, rlwatch.alerts.engine, rlwatch.alerts.messages, "
        "rlwatch.alerts.outbox, rlwatch.notify.webhook, rlwatch.notify.registry, rlwatch.testing.webhook_receiver; "
        "print([m for m in ('pydantic', 'httpx', 'tenacity', 'numpy', 'pytest') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )

    assert done.stdout.strip() == "[]"


def test_every_kind_of_channel_can_be_written_in_the_file(tmp_path: Path):
    """Secrets from the environment; a program as a list of words."""
    file = tmp_path / "rlwatch.toml"
    file.write_text(
        '[notify.slack]\nurl = "env:SLACK"\ntotal_s = 5\n'
        '[notify.mail]\nkind = "email"\nurl = "env:MAIL"\n'
        '[notify.page]\nkind = "command"\nargv = ["cat", "-"]\npass_env = ["HOME"]\n[notify.wandb]\n'
    )
    env = {"SLACK": "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7F", "MAIL": "mailto://a:b@example.com"}
    built = build_notifiers(load_config(file, env=env), console=False, env=env)

    assert {name: type(notifier).__name__ for name, notifier in built.items()} == {
        "slack": "ServiceNotifier",
        "mail": "EmailNotifier",
        "page": "CommandNotifier",
        "wandb": "WandbNotifier",
    }
