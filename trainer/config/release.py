"""Where a blessed model goes, whether there is anything to train for, and who hears how it ended."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer.config.section import Place, PositiveInt, Problem, Section, text


class PushConfig(Section):
    """Where a blessed model goes."""

    registry: Place | None = None
    """Folder or `gs://` prefix of the model registry. None: `models` under the root of the run."""
    keep_versions: PositiveInt = 10
    """How many of the newest versions the registry keeps, besides every version that was ever champion."""


class RetrainConfig(Section):
    """Whether there is anything to train for."""

    when: Literal["always", "data_changed"] = "always"
    """`data_changed`: training is skipped where the prepared data is what the champion was trained on."""
    force: bool = False
    """Train all the same, this time."""

    def problems(self) -> Iterator[Problem]:
        """Force where nothing is ever skipped."""
        if self.force and self.when == "always":
            yield Problem("force", True, "changes nothing, since retrain.when is always")


class Channel(Section):
    """One way to reach somebody. Addresses stand in a Kubernetes secret, never here."""

    kind: Literal["webhook", "slack", "email"]
    """`webhook`: JSON with every fact. `slack`: text for an incoming webhook of Slack or of what understands the same.
    `email`: by SMTP."""
    secret: text(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", "the name of a Kubernetes secret")
    """Secret with the key `url`: of the webhook, or `smtp://user:password@host:587`; for e-mail also `to` and `from`."""


Event = Literal["failed", "not_blessed", "promoted", "skipped"]


class NotifyConfig(Section):
    """Who hears how a run ended. It never fails a run."""

    on: list[Event] = ["failed", "not_blessed", "promoted"]
    """What is told: the run failed, the model was not good enough, it was promoted, training was skipped."""
    channels: list[Channel] = Field(min_length=1)
    """Who is told."""
    run_link: str | None = None
    """Address of Kubeflow's pages, for a link to the run. None: `kubeflow.host`."""
