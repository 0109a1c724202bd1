"""One message per run to those who want it: a webhook with JSON, Slack, or e-mail. Never fails, never names an address.

    send(config, event="failed", facts={"run": …, "error": …}, environ=os.environ, sleep=time.sleep)

Addresses and passwords come from environment variables, which Kubernetes fills from a secret: TRIREME_NOTIFY_0_URL for the
first channel, and TRIREME_NOTIFY_0_TO, TRIREME_NOTIFY_0_FROM for e-mail.
"""

import contextlib
import http.client
import json
import smtplib
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from typing import Any

from trainer.config import Channel, NotifyConfig

_ATTEMPTS = 4
_TIMEOUT_SECS = 10.0
_HEADLINES = {
    "failed": "failed",
    "not_blessed": "trained a model that is not good enough",
    "promoted": "promoted a new model",
    "skipped": "skipped training, because the data has not changed",
}


def variable(index: int, key: str) -> str:
    """The environment variable that holds one fact of a channel."""
    return f"TRIREME_NOTIFY_{index}_{key.upper()}"


def event_of(state: str, parts: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What happened, from the run's state and what its tasks left; None where there is nothing to say."""
    if state == "SUCCEEDED":
        if "pushed" in parts:
            return "promoted"
        if "skipped" in parts:
            return "skipped"
        return "not_blessed" if parts.get("verdict", {}).get("verdict") == "not_blessed" else None
    return None if state in ("CANCELED", "CANCELLED") else "failed"


def send(
    config: NotifyConfig,
    event: str,
    facts: dict[str, Any],
    environ: Mapping[str, str],
    sleep: Callable[[float], None],
) -> list[str]:
    """Sends the message to every channel that wants it.

    Args:
        config: The `notify` section.
        event: What happened.
        facts: `name`, `run`, and as far as known `error`, `task`, `reasons`, `metrics`, `version`, `link`, `report`.
        environ: Holds the addresses.
        sleep: Waits so many seconds between tries.

    Returns:
        One sentence for each channel: that it was told, or why not. None of them holds an address.
    """
    if event not in config.on:
        return []
    return [_told(index, channel, event, facts, environ, sleep) for index, channel in enumerate(config.channels)]


def text_of(event: str, facts: dict[str, Any]) -> str:
    """The message for a person: what happened, why, and where to look."""
    lines = [f"{facts['name']} {_HEADLINES[event]}"]
    if event == "failed":
        where = f" in {facts['task']}" if facts.get("task") else ""
        lines[0] += f"{where}: {facts.get('error') or 'no reason was given'}"
    lines += [str(reason) for reason in facts.get("reasons") or ()]
    if facts.get("metrics"):
        shown = (f"{key} {value:.4f}" for key, value in facts["metrics"].items() if value is not None)
        lines.append("test metrics: " + ", ".join(shown))
    if facts.get("version") is not None:
        lines.append(f"version {facts['version']}")
    lines += [f"{name}: {facts[name]}" for name in ("link", "report", "run") if facts.get(name)]
    return "\n".join(lines)


def _told(
    index: int, channel: Channel, event: str, facts: dict[str, Any], environ: Mapping[str, str], sleep: Any
) -> str:
    name = f"notification {index} ({channel.kind})"
    url = environ.get(variable(index, "url"), "").strip()
    if not url:
        return f"{name}: {variable(index, 'url')} is not set; nothing was sent"
    for attempt in range(_ATTEMPTS):
        try:
            if channel.kind == "email":
                # Without the line's end that `kubectl create secret --from-file` keeps.
                to, sender = (environ.get(variable(index, key), "").strip() for key in ("to", "from"))
                _mail(url, to, sender, event, facts)
            else:
                _post(url, {"text": text_of(event, facts)} if channel.kind == "slack" else {"event": event, **facts})
            return f"{name}: sent"
        except _Final as error:
            return f"{name}: {error}; not sent"
        except (ValueError, http.client.InvalidURL) as error:
            if not isinstance(error, OSError):  # which a certificate that is not trusted is as well
                return f"{name}: its address, `to` or `from` cannot be read; not sent"
            reason = _reason(error)
        except Exception as error:  # whatever it is, the run has ended and must not fail for it
            reason = _reason(error)
        if attempt < _ATTEMPTS - 1:
            sleep(2.0**attempt)
    return f"{name}: not sent after {_ATTEMPTS} tries ({reason})"


def _reason(error: Exception) -> str:
    """What went wrong, without the text of a library's error, which may hold the address."""
    if isinstance(error, urllib.error.HTTPError):
        return f"it answered {error.code}"
    if isinstance(error, smtplib.SMTPResponseException):
        return f"it answered {error.smtp_code}"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(error, smtplib.SMTPServerDisconnected):
        if not isinstance(error.__context__, TimeoutError):
            return "the mail server hung up"
        cause = error.__context__
    if isinstance(cause, TimeoutError):
        return f"no answer within {_TIMEOUT_SECS:.0f} s"
    if isinstance(cause, OSError) and cause.errno is not None and cause.strerror:
        return cause.strerror
    return type(cause).__name__


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A message that is led elsewhere would arrive there without its content, and pass for sent."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class _Final(Exception):
    """Trying again would not help."""


def _post(url: str, content: dict[str, Any]) -> None:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise _Final("its address does not begin with http:// or https://")
    body = json.dumps(content, ensure_ascii=False, default=str).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - checked above
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_SECS):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        if error.code < 500 and error.code not in (408, 425, 429):
            raise _Final(f"it answered {error.code}") from None
        raise


def _mail(url: str, to: str, sender: str, event: str, facts: dict[str, Any]) -> None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("smtp", "smtps") or not parts.hostname:
        raise _Final("its address must be smtp://user:password@host:port or smtps://…")
    if not to or not sender:
        raise _Final("its secret must say to and from")
    message = EmailMessage()
    message["Subject"] = text_of(event, facts).splitlines()[0][:200]
    message["From"], message["To"] = sender, to
    message.set_content(text_of(event, facts))
    if parts.scheme == "smtps":
        server = smtplib.SMTP_SSL(parts.hostname, parts.port or 465, timeout=_TIMEOUT_SECS,
                                  context=ssl.create_default_context())  # fmt: skip
    else:
        server = smtplib.SMTP(parts.hostname, parts.port or 25, timeout=_TIMEOUT_SECS)
    with server:
        if parts.scheme == "smtp" and server.ehlo()[0] == 250 and server.has_extn("starttls"):
            server.starttls(context=ssl.create_default_context())
            server.ehlo()
        if parts.username:
            if parts.scheme == "smtp" and not isinstance(server.sock, ssl.SSLSocket):
                raise _Final("the mail server offers no encryption, and the password would go in the clear")
            server.login(urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or ""))
        server.send_message(message)
        with contextlib.suppress(
            smtplib.SMTPException, OSError
        ):  # it is sent, and must not be sent again for a bad farewell
            server.quit()
