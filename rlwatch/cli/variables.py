"""Environment variables that rlwatch reads or sets, with their meaning."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES: Mapping[str, str] = {
    "RLWATCH_STORE": "the store: a directory, `sqlite:///directory`, `postgresql://...`",
    "RLWATCH_RUN_ID": "id of the run that a trainer begins or continues",
    "RLWATCH_CONFIG": "path of the `rlwatch.toml` that applies",
    "RLWATCH_WEBHOOK_URL": "makes the channel `webhook`",
    "RLWATCH_WEBHOOK_SECRET": "signs what the webhook is sent",
    "RLWATCH_LOCAL_DIR": "local disk of a trainer whose store is on a network; default `/tmp/rlwatch-UID`",
    "RLWATCH_JOURNAL_MB": "most megabytes of a run that wait while its store takes nothing, 1 or more; default 256",
    "RLWATCH_SHARED_STORE": "`1`: nodes share the store's directory without locks to rely on (NFS), if unseen",
    "RLWATCH_SYSTEM": "`off` or `0`: do not measure the machine beside a run",
    "RLWATCH_STALL_S": "seconds without a step or a change of stage after which a process stores its stacks; 108",
    "RLWATCH_ENGINES": "addresses of rollout engines' metrics that rank 0 reads beside a run, with commas between them",
    "RLWATCH_STATE_DIR": "where logins and marks of processes are kept; default `~/.local/state/rlwatch`",
    "RLWATCH_PLUGINS": "`off` leaves all plug-ins out",
    "RLWATCH_DEBUG": "`1` prints tracebacks of known errors, too",
    "RLWATCH_FORECASTER": "name of a plug-in's forecaster",
    "RLWATCH_FORECAST_MODEL": "path of a forecaster of your own",
    "RLWATCH_FORECAST_EVIDENCE": "whose runs prove a chance that is shown: `others` (default); `own`: those of rlwatch",
    "RLWATCH_FORECAST_BUDGET": "false alarms in 1,000 healthy steps: `0.25`, `0.5` (default), `1`, `2` or `5`",
    "RLWATCH_FORECAST_THRESHOLD": "chance from which on a forecast is an alarm",
    "RLWATCH_LINK_HOST": "address on which rank 0 listens for the other ranks",
    "RLWATCH_LINK_PORT": "its port; a free one by default",
    "RLWATCH_LINK_SECRET": "what ranks prove to know, 16 characters or more; random by default",
    "RLWATCH_UI_TOKEN": "the operator's token of the dashboard; `RLWATCH_UI_TOKEN_FILE`: a file that holds it",
    "RLWATCH_UI_VIEWER_TOKEN": "the viewer's token; `RLWATCH_UI_VIEWER_TOKEN_FILE` likewise",
    "RLWATCH_DELIVERY": "given to a channel's command: id of the message, the same at every try",
    "RLWATCH_EVENT": "given to a channel's command: what happened to the alert",
}
