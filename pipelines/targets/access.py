"""The way to a Kubeflow Pipelines server, and every answer that is no answer explained in one sentence.

    access = find_access(config.kubeflow, flags={"host": None}, environ=os.environ)
    server = Server(access, SYSTEM_CLOCK)
    server.call("list the runs", lambda client: client.list_runs(namespace=access.namespace))

Calls that may be repeated are repeated with growing pauses; those that make something are repeated only when it is known
that nothing was made. Token and cookies appear in no text.
"""

import contextlib
import io
import json
import random
import re
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipelines.operation import HOST, NAMESPACE, KubeflowConfig
from trainer.errors import BadInput, TriremeError, WorldFailure

_IN_CLUSTER_TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")
_ATTEMPTS = 6
_LONGEST_PAUSE_SECS = 30.0
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_NOTHING_MADE = (425, 429)
T = TypeVar("T")


class Clock(NamedTuple):
    """Time, as it is passed in, so that tests neither wait nor depend on the date."""

    now: Callable[[], datetime]
    """The moment, in UTC."""
    sleep: Callable[[float], None]
    """Waits so many seconds."""


SYSTEM_CLOCK = Clock(lambda: datetime.now(UTC), time.sleep)


def system_clock() -> Clock:
    """The clock of this machine."""
    return SYSTEM_CLOCK


@dataclass(frozen=True)
class Access:
    """Everything that is needed to get in."""

    host: str
    namespace: str | None = None
    token: str | None = field(default=None, repr=False)
    cookies: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    client_certificate: str | None = None
    client_key: str | None = None
    timeout_secs: int = 30

    def hide(self, text: str) -> str:
        """The text without token and cookies."""
        for secret in (self.token, self.cookies, *(re.findall(r"=([^;\s]{6,})", self.cookies or ""))):
            if secret:
                text = text.replace(secret, "…")
        return text


def find_access(config: KubeflowConfig, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Access:
    """Puts the access together: what the flags say, else the configuration, else the environment.

    Args:
        config: The `kubeflow` section.
        flags: Values of the command line by the section's names; None where a flag was not given.
        environ: TRIREME_KFP_HOST (or KF_PIPELINES_ENDPOINT), TRIREME_KFP_NAMESPACE, TRIREME_KFP_TOKEN,
            TRIREME_KFP_COOKIES.

    Raises:
        BadInput: No server is named, or a file or command that should hold a secret does not give one.
    """

    def chosen(name: str, *variables: str) -> Any:
        if flags.get(name) is not None:
            return flags[name]
        if getattr(config, name) is not None:
            return getattr(config, name)
        return next((environ[variable] for variable in variables if environ.get(variable)), None)

    namespace = chosen("namespace", "TRIREME_KFP_NAMESPACE")
    host = chosen("host", "TRIREME_KFP_HOST", "KF_PIPELINES_ENDPOINT")
    if host is None and environ.get("KUBERNETES_SERVICE_HOST"):
        host = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
    if host is None:
        raise BadInput("kubeflow.host = null: no server is named; give --host, kubeflow.host or TRIREME_KFP_HOST")
    if re.match(r"[^/]*//[^/]*@", host):
        raise BadInput("host: holds a name or a password, which would be shown; give a token or cookies")
    if not re.fullmatch(HOST, host):
        raise BadInput(f"host = {host}: must be an address such as https://kubeflow.example.org/pipeline")
    if namespace is not None and not re.fullmatch(NAMESPACE, namespace):
        raise BadInput(f"namespace = {namespace}: must be lower-case letters, digits and hyphens, at most 63")
    for name in ("ca_file", "client_certificate", "client_key"):
        if chosen(name) is not None and not Path(chosen(name)).is_file():
            raise BadInput(f"kubeflow.{name} = {chosen(name)}: there is no such file")
    cookies_file = chosen("cookies_file")
    token = _token(config, flags, environ)
    cookies = _secret("cookies_file", cookies_file) if cookies_file else environ.get("TRIREME_KFP_COOKIES")
    for name, secret in (("token", token), ("cookies", cookies)):
        if secret is not None and not (secret.isascii() and secret.isprintable()):
            raise BadInput(f"kubeflow: the {name} must be one line of plain characters, as a header can carry it")
    return Access(
        host=host.rstrip("/"),
        namespace=namespace,
        token=token,
        cookies=cookies,
        ca_file=chosen("ca_file"),
        client_certificate=chosen("client_certificate"),
        client_key=chosen("client_key"),
        timeout_secs=config.timeout_secs,
    )


def _token(config: KubeflowConfig, flags: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    for given in (flags, config.model_dump()):
        if given.get("token_file"):
            return _secret("token_file", given["token_file"])
        if given.get("token_command"):
            return _printed(given["token_command"])
    if environ.get("TRIREME_KFP_TOKEN"):
        return environ["TRIREME_KFP_TOKEN"].strip()
    return _secret("token_file", str(_IN_CLUSTER_TOKEN)) if _IN_CLUSTER_TOKEN.is_file() else None


def _secret(name: str, file: str) -> str:
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"kubeflow.{name} = {file}: cannot be read ({getattr(error, 'strerror', 'not text')})") from None
    if not text:
        raise BadInput(f"kubeflow.{name} = {file}: is empty")
    if "\n" in text:
        raise BadInput(f"kubeflow.{name} = {file}: must hold one line")
    return text


def _printed(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or "gave no answer within 60 s"
        raise BadInput(f"kubeflow.token_command = {command[0]}: {reason}") from None
    token = done.stdout.strip()
    if done.returncode or not token or "\n" in token:
        raise BadInput(
            f"kubeflow.token_command = {command[0]}: must print a token on one line, and ended with {done.returncode}"
        )
    return token


class Missing(BadInput):
    """The server knows no such thing."""


class Server:
    """A Kubeflow Pipelines server, reached through kfp's own client.

    Args:
        access: How to get in.
        clock: Time, for the pauses between tries.
        renew: Gives the access anew when the token has expired. None: it cannot be renewed.
    """

    def __init__(self, access: Access, clock: Clock, renew: Callable[[], Access] | None = None) -> None:
        self.access, self.clock, self._renew = access, clock, renew
        self._client = _client(access)

    def call(self, what: str, function: Callable[[Any], T], *, attempts: int = _ATTEMPTS) -> T:
        """Asks the server something that may be asked again: reading, or making a state what it should be.

        Args:
            what: The deed, to end the sentence "… could not …".
            function: Gets kfp's client.
            attempts: How often at most.

        Raises:
            Missing: The server knows no such thing.
            BadInput: It refuses.
            WorldFailure: It cannot be reached, or fails.
        """
        return self._tried(what, function, lambda error: _status(error) in (None, *_PASSING), attempts)

    def make(self, what: str, function: Callable[[Any], T], find: Callable[[], T | None]) -> T:
        """Makes something once, also when the answer is lost on the way.

        Args:
            what: The deed, to end the sentence "… could not …".
            function: Gets kfp's client and makes it.
            find: Looks for what may have been made although no answer came.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return self._tried(what, function, _nothing_was_made, _ATTEMPTS)
            except _Unsure as unsure:
                found = find()
                if found is not None:
                    return found
                if attempt == _ATTEMPTS - 1:
                    raise unsure.explained from None
                self._pause(attempt, None)
        raise AssertionError("the loop returns or raises")

    def _tried(self, what: str, function: Callable[[Any], T], passes: Callable[[Exception], bool], attempts: int) -> T:
        renewed = False
        for attempt in range(attempts):
            try:
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # kfp's and urllib3's remarks on their own future
                    return function(self._client)
            except TriremeError:
                raise
            except Exception as error:
                if not _of_the_network(error):
                    raise
                if _status(error) == 401 and self._renew is not None and not renewed:
                    renewed, self.access = True, self._renew()
                    self._client = _client(self.access)
                    continue
                if passes(error) and attempt < attempts - 1:
                    self._pause(attempt, error)
                    continue
                explained = explain(error, what, self.access)
                if passes is _nothing_was_made and _status(error) in (None, *_PASSING) and not passes(error):
                    raise _Unsure(explained) from None
                raise explained from None
        raise explain(_Unauthorised(), what, self.access)

    def _pause(self, attempt: int, error: Exception | None) -> None:
        headers = getattr(error, "headers", None) or {}
        asked = str(headers.get("Retry-After", ""))
        pause = float(asked) if asked.isdecimal() else 2.0**attempt * random.uniform(0.75, 1.25)  # noqa: S311
        self.clock.sleep(min(pause, _LONGEST_PAUSE_SECS))


class _Unsure(Exception):
    """Nobody can say whether the server did it."""

    def __init__(self, explained: TriremeError) -> None:
        super().__init__(str(explained))
        self.explained = explained


class _Unauthorised(Exception):
    status = 401
    body = None


class HtmlPage(Exception):
    """A proxy answered with a page for people, and with success."""


class ForeignAnswer(HtmlPage):
    """Something else than a Kubeflow Pipelines server answered, and with success."""


def explain(error: Exception, what: str, access: Access) -> TriremeError:
    """One sentence on what went wrong and what to do, without a secret."""
    status, host = _status(error), access.host
    where = f" in the namespace {access.namespace}" if access.namespace else ""
    said = access.hide(_said(error))
    begin = f"{host} could not {what}"
    if isinstance(error, ForeignAnswer):
        return BadInput(
            f"{begin}: what answered is no Kubeflow Pipelines server; check the path of --host, often /pipeline"
        )
    if isinstance(error, HtmlPage) or status in (301, 302, 303, 307, 308):
        return BadInput(
            f"{begin}: a proxy answered with its sign-in page; give --token-file, --token-command or --cookies-file, or"
            " check the path of --host"
        )
    if status == 401:
        return BadInput(
            f"{begin}: it does not accept the credentials (401), they are missing or have expired; give --token-file,"
            " --token-command or --cookies-file, or sign in again"
        )
    if status == 403:
        return BadInput(
            f"{begin}: your account may not{where} (403{said}); ask for the role that docs/operations.md names, or give"
            " another --namespace"
        )
    if status == 404:
        return Missing(f"{begin}: it knows no such thing (404{said}); check the name, and the path of --host")
    if status == 409:
        return BadInput(f"{begin}: it exists already (409{said}); choose another name")
    if status == 413:
        return WorldFailure(
            f"{begin}: it is too large for a proxy on the way (413); raise the proxy's limit of a request"
        )
    if status == 429:
        return WorldFailure(f"{begin}: it is asked too much (429); wait a few minutes and try again")
    if status in (502, 503, 504):
        return WorldFailure(
            f"{begin}: it is not available ({status}{said}); see whether the ml-pipeline deployment runs, then try again"
        )
    if status == 400:
        return BadInput(f"{begin}: it refuses the request (400{said}); see what it says of it")
    if status:
        return WorldFailure(f"{begin}: it answered {status}{said}; see the log of the ml-pipeline deployment")
    text = access.hide(str(getattr(error, "reason", None) or error))
    if "CERTIFICATE_VERIFY_FAILED" in text or "SSL" in text:
        return BadInput(
            f"{begin}: its certificate is not trusted or TLS failed; give kubeflow.ca_file, or check --host"
        )
    if "timed out" in text:
        return WorldFailure(
            f"{begin}: no answer within {access.timeout_secs} s; try again, or raise kubeflow.timeout_secs"
        )
    if "Name or service" in text or "name resolution" in text or "nodename" in text:
        return BadInput(f"{begin}: the name of the host is not known; check --host, and the VPN")
    if "refused" in text:
        return WorldFailure(
            f"{begin}: nothing listens there; check --host, and the port-forward (kubectl port-forward"
            " svc/ml-pipeline-ui 8080:80)"
        )
    return WorldFailure(f"{begin}: the connection failed; check the network and try again")


def _said(error: Exception) -> str:
    """The first line of the server's own words, if it had any that are meant for people."""
    body = getattr(error, "body", None)
    if isinstance(body, bytes):
        body = body.decode("utf-8", "replace")
    try:
        content = json.loads(body or "")
        text = str(content.get("message") or content.get("error") or "")
    except (ValueError, AttributeError):
        return ""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return f": {line if len(line) <= 200 else line[:197] + '...'}" if line else ""


def _status(error: Exception) -> int | None:
    if isinstance(error, HtmlPage):
        return 200
    return getattr(error, "status", None) or None


def _of_the_network(error: Exception) -> bool:
    import kfp_server_api
    import urllib3

    return isinstance(error, kfp_server_api.ApiException | urllib3.exceptions.HTTPError | HtmlPage | OSError)


def _nothing_was_made(error: Exception) -> bool:
    """Whether the request cannot have had an effect, so that it may be made again."""
    import urllib3

    reason = getattr(error, "reason", error)
    if isinstance(reason, urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError):
        return True
    return _status(error) in _NOTHING_MADE


def _client(access: Access) -> Any:
    """kfp's client, without its habits: no file in the home folder decides, nothing waits for ever, nothing is printed."""
    import kfp.client
    import urllib3

    class Client(kfp.client.Client):
        def _load_context_setting_or_default(self) -> None:
            self._context_setting = {"namespace": access.namespace}

        def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
            return self._healthz_api.healthz_service_get_healthz()

        def _load_config(self, *args: Any, **kwargs: Any) -> Any:
            config = super()._load_config(*args, **kwargs)
            config.cert_file, config.key_file = access.client_certificate, access.client_key
            # kfp's transport would follow a proxy to its sign-in page, and repeat on its own.
            config.retries = urllib3.Retry(total=None, connect=0, read=0, redirect=0, status=0, other=0,
                                           raise_on_redirect=False, raise_on_status=False)  # fmt: skip
            return config

        def __init__(self) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                super().__init__(
                    host=access.host,
                    # Any other value than kfp's default keeps its constructor from asking the server.
                    namespace=access.namespace or "default",
                    existing_token=access.token,
                    cookies=access.cookies,
                    ssl_ca_cert=access.ca_file,
                )
            self._context_setting["namespace"] = access.namespace
            transport = self._run_api.api_client.rest_client
            plain = transport.request

            def request(method: str, url: str, **kwargs: Any) -> Any:
                kwargs["_request_timeout"] = (min(access.timeout_secs, 10), access.timeout_secs)
                answer = plain(method, url, **kwargs)
                kind = answer.urllib3_response.headers.get("content-type", "")
                if "html" in kind or answer.data[:1] in (b"<", "<"):  # kfp would take it for an empty answer
                    raise HtmlPage
                said = answer.data.strip()
                if answer.status < 300 and (said or method == "GET"):
                    try:
                        whole = isinstance(json.loads(said), dict)
                    except ValueError:
                        whole = False
                    if not whole:
                        raise ForeignAnswer  # kfp would take this for an empty one, too
                return answer

            transport.request = request

    return Client()
