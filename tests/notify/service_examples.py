"""Addresses of the services, and a way to have what goes to them arrive on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from rlwatch.notify.http import Courier, Reply
from rlwatch.notify.registry import build_notifier
from rlwatch.ports import Notifier

TOKEN = "contract-s3cret-value"


@dataclass(frozen=True)
class Example:
    """``address`` in apprise's way of writing, with ``{t}`` for the secret as it has to look there."""

    address: str
    native: str = ""
    yes: bytes = b""
    form: str = r".*"

    def fits(self, token: str) -> str:
        return "".join(re.findall(self.form, token))


EXAMPLES = {
    "slack": Example(
        "slack://T1JJ3T3L2/A1BRTD4JD/{t}",
        "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/{t}",
        b"ok",
        "[A-Za-z0-9]",
    ),
    "discord": Example("discord://4174216298/{t}", "https://discord.com/api/webhooks/4174216298/{t}"),
    "teams": Example(
        "workflows://prod.logic.azure.com/643e69f83c8944/{t}",
        "https://prod.logic.azure.com/workflows/643e69f83c8944/triggers/manual/paths/invoke"
        "?api-version=2016-06-01&sp=%2Ftriggers&sv=1.0&sig={t}",
    ),
    "telegram": Example("tgram://123456789:{t}/-10012345", "", b'{"ok": true, "result": {}}'),
    "feishu": Example("feishu://{t}", "https://open.feishu.cn/open-apis/bot/v2/hook/{t}", b'{"code": 0}'),
    "lark": Example("lark://{t}", "https://open.larksuite.com/open-apis/bot/v2/hook/{t}", b'{"code": 0}'),
    "dingtalk": Example(
        "dingtalk://{t}", "https://oapi.dingtalk.com/robot/send?access_token={t}", b'{"errcode": 0}', "[a-zA-Z0-9]"
    ),
    "wecom": Example("wecombot://{t}", "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key={t}", b'{"errcode": 0}'),
    "pagerduty": Example("pagerduty://{t}@{t}/", form="[A-Za-z0-9-]"),
}


class Rerouted(Courier):
    """Sends what is for a service to ``base`` instead, under the same path."""

    def __init__(self, base: str, name: str, **limits: float) -> None:
        super().__init__(name, **limits)
        self.base, self.asked = urlsplit(base), []

    def send(self, url: str, content: bytes, headers: dict[str, str], **more: object) -> Reply:
        self.asked.append(url)
        there = urlsplit(url)._replace(scheme=self.base.scheme, netloc=self.base.netloc)
        return super().send(urlunsplit(there), content, headers, **more)


def rerouted(kind: str, base: str, *, token: str = TOKEN, native: bool = False, **limits: float) -> Notifier:
    """A notifier of this kind whose service is at ``base``."""
    example = EXAMPLES[kind]
    address = (example.native if native else example.address).format(t=example.fits(token))
    notifier = build_notifier(kind, kind, {"url": address})
    notifier.courier = Rerouted(base, kind, **limits)
    return notifier
