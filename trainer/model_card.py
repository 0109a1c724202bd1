"""A model in a page of Markdown, stored beside its files: what it is, how good, by which rules, made from what.

card = model_card("digits", evaluation, verdict, training, serving)
"""

import json
from collections.abc import Mapping
from typing import Any

from trainer.report.markdown import markdown_summary

CARD_FILE = "MODEL_CARD.md"


def model_card(
    name: str,
    evaluation: Mapping[str, Any],
    verdict: Mapping[str, Any],
    training: Mapping[str, Any],
    serving: Mapping[str, Any],
) -> str:
    """The card (Mitchell et al., Model Cards for Model Reporting, 2019), of what is known without asking a person.

    Args:
        name: The model's name.
        evaluation: What `trainer.evaluate` found.
        verdict: What was decided.
        training: What `train.json` holds.
        serving: What the serving check found.
    """
    classes = evaluation.get("class_names") or []
    told = f"one of {len(classes)} classes" if classes else "a number"
    measured = serving.get("measured", {})
    facts = [
        ("Tells", f"`{evaluation.get('label', 'label')}`, {told}"),
        (
            "Architecture",
            f"`{training.get('train', {}).get('model')}`, {training.get('num_parameters', 0):,} parameters",
        ),
        (
            "Training",
            f"{training.get('epochs')} epochs, {training.get('steps', 0):,} steps, seed {training.get('seed')}",
        ),
        ("Data", f"`{evaluation['data_digest']}`"),
        ("Model", f"`{evaluation.get('model_digest')}`"),
    ]
    if "latency_1" in measured:
        latency = measured["latency_1"]
        facts.append(("Latency of one example", f"{latency['p50_ms']:.1f} ms, p99 {latency['p99_ms']:.1f} ms"))
        facts.append(("Memory when serving", f"{measured['peak_bytes'] / 1024**2:,.0f} MiB, TensorFlow included"))
    blocks = [
        f"# {name}",
        "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in facts),
        markdown_summary(dict(evaluation), dict(verdict)).replace("# ", "## ", 1).strip(),
    ]
    if slices := [row for row in evaluation.get("slices", []) if row["judged"]]:
        first = next(iter(slices[0]["metrics"]), None)
        rows = [
            f"| {_cell(row['slice'])} | {row['num_examples']:,} | {_shown(row['metrics'].get(first))} |"
            for row in slices
        ]
        blocks.append(f"## Slices\n\n| Slice | Examples | {first} |\n|:---|---:|---:|\n" + "\n".join(rows))
    blocks.append(
        "## Limits\n\nMeasured on the test split of this data alone. It says nothing of other data, and nothing of whether"
        " the labels are right or the use is fair: a person has to."
    )
    settings = json.dumps(training.get("train", {}), indent=1, sort_keys=True, ensure_ascii=False)
    blocks.append(f"## Training settings\n\n```json\n{settings}\n```")
    return "\n\n".join(blocks) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
