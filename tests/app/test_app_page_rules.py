"""The page of rules and channels, as Streamlit draws it."""

import pytest
from app_world import alert, finding, html, no_traceback, put_alerts, rules_page, tables, write_run

from rlwatch.alerts.config import load_config
from rlwatch.store.url import open_store
from rlwatch.testing.webhook_receiver import WebhookReceiver


@pytest.fixture(autouse=True)
def no_config(monkeypatch, tmp_path_factory):
    """No file of the machine's."""
    monkeypatch.delenv("RLWATCH_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


def rows(page):
    return {
        row["cells"][0]["text"]: [cell.get("text") for cell in row["cells"]] for row in tables(page)["rules"]["rows"]
    }


def chosen(name):
    page = rules_page()
    page.selectbox(key="rule").set_value(name).run()
    return page


def test_the_rules_that_apply_are_listed_with_where_they_are_from(store_dir):
    """Default ones, changed ones, added ones; what a store may not say is shown."""
    (store_dir / "rlwatch.toml").write_text(
        'dashboard = { url = "http://x" }\n[[rules]]\nname = "kl"\nfor_steps = 40\n[[rules]]\nname = "mine"\nkinds = ["kl_drift"]'
    )
    page = rules_page()
    assert no_traceback(page)
    by = {name: row[-1] for name, row in rows(page).items()}
    assert (by["kl"], by["mine"], by["entropy"]) == ("changed", "added", "default")
    assert "not obeyed: [dashboard]" in page.warning[0].value


def test_a_rule_is_tried_on_runs_and_says_where_it_would_have_fired(store_dir):
    """By what is stored of them; the number of times in words."""
    write_run(store_dir, findings=[finding()])
    page = chosen("entropy")
    page.button(key="rule-try").click().run()
    assert no_traceback(page)
    assert "would have fired 1 time on 1 of 1 run" in html(page)
    assert "at step 20: entropy collapse (critical)" in html(page).replace("<b>", "").replace("</b>", "")
    page = chosen("kl")
    page.button(key="rule-try").click().run()
    assert "would not have fired on 1 run" in html(page)


def test_an_edited_rule_is_kept_applies_and_is_taken_back(store_dir):
    """In the store's file, with who did it in the audit."""
    page = chosen("kl")
    page.number_input(key="rule-for-kl").set_value(3)
    page.button(key="rule-save").click().run()
    assert no_traceback(page)
    assert page.success[0].value == "Rule kl saved"
    assert next(r for r in load_config(store_root=store_dir, env={}).rules if r.name == "kl").for_steps == 3
    assert rows(page)["kl"][-1] == "changed"
    assert [(e.by, e.act, e.text) for e in open_store(str(store_dir)).audit()] == [
        ("ann", "rules", "kl in rlwatch.toml of the store")
    ]
    page.selectbox(key="rule").set_value("kl").run()
    page.button(key="rule-drop").click().run()
    assert rows(page)["kl"][-1] == "default"


def test_a_rule_is_added_and_a_wrong_one_says_what_is_wrong(store_dir):
    """Nothing is written then."""
    page = chosen("New rule")
    assert not page.error
    assert any("Give the rule a name" in caption.value for caption in page.caption)
    page.text_input(key="rule-name-new").input("no spaces allowed").run()
    assert "made of letters, digits" in page.error[0].value
    page.text_input(key="rule-name-new").input("mine").run()
    page.multiselect(key="rule-kinds-new").set_value(["kl_drift"]).run()
    page.button(key="rule-save").click().run()
    assert no_traceback(page)
    assert rows(page)["mine"][-1] == "added"


def test_where_another_file_is_obeyed_nothing_is_written_into_the_store(store_dir, tmp_path, monkeypatch):
    """The page says which; a rule can be tried all the same."""
    own = tmp_path / "own.toml"
    own.write_text('[[rules]]\nname = "kl"\nkinds = ["kl_drift"]\nfor_steps = 7')
    monkeypatch.setenv("RLWATCH_CONFIG", str(own))
    page = rules_page()
    assert no_traceback(page)
    assert any("overrides the store's rules: edit that file" in caption.value for caption in page.caption)
    assert not [button for button in page.button if button.key == "rule-save"]
    assert not (store_dir / "rlwatch.toml").exists()


def test_a_channel_is_tried_over_http_and_nothing_secret_is_shown(store_dir, tmp_path, monkeypatch):
    """Its name, its kind, and what the receiver answered."""
    with WebhookReceiver(secret="s3cret-of-ours") as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        monkeypatch.setenv("HOOK_SECRET", "s3cret-of-ours")
        own = tmp_path / "own.toml"
        own.write_text('[notify.hook]\nkind = "webhook"\nurl = "env:HOOK"\nsecret = "env:HOOK_SECRET"')
        monkeypatch.setenv("RLWATCH_CONFIG", str(own))
        page = rules_page()
        page.button(key="try-hook").click().run()
        assert no_traceback(page)
        assert page.success[0].value.startswith("hook: delivered")
        [got] = receiver.received
    assert (got.event, got.verified) == ("test", True)
    shown = html(page) + "".join(element.value for element in (*page.caption, *page.success))
    assert receiver.url not in shown
    assert "s3cret" not in shown


def test_a_viewer_changes_nothing_and_sends_nothing(store_dir, looks, monkeypatch):
    """Trying a rule is looking; the role is checked where it is written."""
    write_run(store_dir, findings=[finding()])
    put_alerts(store_dir, [alert()])
    looks("eve", "viewer")
    page = chosen("kl")
    page.button(key="rule-save").click().run()
    assert "eve has read-only access" in page.code[0].value
    assert not (store_dir / "rlwatch.toml").exists()
    assert not [button for button in page.button if (button.key or "").startswith("try-")]
