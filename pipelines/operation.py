"""How a pipeline is operated: the server it is sent to, its schedules, and who hears of its runs.

None of this changes what a run computes: a new schedule makes no new version of a pipeline.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from pipelines.cron import parse_cron, zone_of
from trainer.config import PositiveInt, Problem, Section, text
from trainer.errors import BadInput

_PORT = r"[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5]"
HOST = rf"https?://(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:]+)(:({_PORT}))?(/[^\s?#]*)?"
NAMESPACE = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_Namespace = text(NAMESPACE, "the name of a namespace: lower-case letters, digits and hyphens, at most 63")
_Host = text(HOST, "an address such as https://kubeflow.example.org/pipeline, without a password")
_Owner = text(
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", "at most 63 letters, digits, hyphens, dots and underscores"
)
ScheduleName = text(
    r"[a-z]([-a-z0-9]{0,30}[a-z0-9])?", "lower-case letters, digits and hyphens, at most 32, a letter first"
)


class KubeflowConfig(Section):
    """Where the Kubeflow Pipelines server is and how to get in. Names files and commands, never a secret itself."""

    host: _Host | None = None
    """Address of the server, such as `https://kubeflow.example.org/pipeline`. None: `--host` or TRIREME_KFP_HOST."""
    namespace: _Namespace | None = None
    """Kubernetes namespace of the runs where the server keeps users apart. None: it does not."""
    experiment: str | None = None
    """Group of runs on the server. None: the pipeline's name."""
    owner: _Owner = "trireme"
    """Who the schedules belong to; those of another owner are never touched."""
    token_file: str | None = None
    """File with the bearer token."""
    token_command: Annotated[list[str], Field(min_length=1)] | None = None
    """Program and arguments that print the bearer token, run without a shell."""
    cookies_file: str | None = None
    """File with the value of the `Cookie` header that a proxy in front of the server asks for."""
    ca_file: str | None = None
    """Certificates of the authorities that the server's certificate is checked against. None: the usual ones."""
    client_certificate: str | None = None
    """Client certificate in PEM."""
    client_key: str | None = None
    """Private key of the client certificate."""
    timeout_secs: PositiveInt = 30
    """Longest wait for one answer."""

    def problems(self) -> Iterator[Problem]:
        """Two sources of one token, and half a client certificate."""
        if self.token_file is not None and self.token_command is not None:
            yield Problem("token_command", self.token_command, "give token_file or token_command, not both")
        if (self.client_certificate is None) != (self.client_key is None):
            yield Problem("client_certificate", self.client_certificate, "goes together with client_key; give both")


class ScheduleConfig(Section):
    """When the pipeline runs by itself."""

    cron: str
    """Minute, hour, day of the month, month, day of the week, such as `0 3 * * mon`, in the time zone."""
    timezone: str = "UTC"
    """Name of the time zone, such as `Europe/Berlin`."""
    start: str | None = None
    """First moment, such as `2027-01-01T00:00:00Z`. None: at once."""
    end: str | None = None
    """Last moment. None: there is none."""
    max_concurrency: Annotated[int, Field(ge=1, le=10)] = 1
    """Runs of this schedule at a time."""
    catchup: bool = False
    """Whether moments that were missed, while the schedule or the server stood still, are made up for."""
    version: Literal["pin", "latest"] = "pin"
    """`pin`: the version of this file, until the next `schedule apply`. `latest`: whatever was uploaded last."""
    enabled: bool = True
    """Whether it runs."""
    overrides: dict[str, Any] = {}
    """Settings of its own by dotted path, such as `train.epochs: 3`."""

    def problems(self) -> Iterator[Problem]:
        """Cron, zone and moments that cannot be read."""
        for field, read in (("cron", parse_cron), ("timezone", zone_of), ("start", moment), ("end", moment)):
            value = getattr(self, field)
            if value is not None:
                try:
                    read(value)
                except BadInput as error:
                    yield Problem(field, value, str(error))
                    return
        if self.start is not None and self.end is not None and moment(self.start) >= moment(self.end):
            yield Problem("end", self.end, f"must be after start ({self.start})")

    @property
    def start_time(self) -> datetime | None:
        """The first moment."""
        return None if self.start is None else moment(self.start)

    @property
    def end_time(self) -> datetime | None:
        """The last moment."""
        return None if self.end is None else moment(self.end)


def moment(text: str) -> datetime:
    """A date and time with its zone. Raises BadInput."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput("must be a date and time, such as 2027-01-01T00:00:00Z") from None
    if found.tzinfo is None:
        raise BadInput("must say its time zone, such as 2027-01-01T00:00:00Z or …+01:00")
    if not 2000 <= found.year < 3000:
        raise BadInput("must be of a year from 2000 to 2999")
    return found
