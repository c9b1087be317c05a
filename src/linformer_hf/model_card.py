"""Writes the model card of a checkpoint: its README.md, with front matter that the Hub understands.

The text is `model_card_template.md`; what is filled in comes from the checkpoint's folder.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open


TEMPLATE = Path(__file__).with_name("model_card_template.md")

# What follows the model's name in the names of classes: task on the Hub, Auto class, intended use
TASKS = {
    "Model": ("feature-extraction", "AutoModel", "Embeddings of texts, and further training."),
    "ForMaskedLM": ("fill-mask", "AutoModelForMaskedLM", "Fine-tuning; by itself it guesses masked words."),
    "ForSequenceClassification": (
        "text-classification",
        "AutoModelForSequenceClassification",
        "Classifying texts like those that it was trained on.",
    ),
    "ForTokenClassification": (
        "token-classification",
        "AutoModelForTokenClassification",
        "Tagging the tokens of texts like those that it was trained on.",
    ),
    "ForQuestionAnswering": (
        "question-answering",
        "AutoModelForQuestionAnswering",
        "Finding answers in texts like those that it was trained on.",
    ),
    "ForMultipleChoice": (
        "multiple-choice",
        "AutoModelForMultipleChoice",
        "Choosing among continuations of texts like those that it was trained on.",
    ),
}
LIMITS = (
    "It takes no longer inputs. What it knows is what its training texts say, with their errors and "
    "prejudices: check it on texts like yours before you rely on it."
)
# Names of figures that are no results
NO_RESULTS = re.compile(r"epoch|.*(runtime|per_second|samples|steps|flos|truncated).*|train_.*")
# Flags whose value nobody else shall read, as the parser takes them
SECRETS = re.compile(r"(--(?:push.to.)?hub.t\w*)([=\s]+)\S+")
SECRET_FIELDS = ("hub_token", "push_to_hub_token")


@dataclass
class Result:
    """A figure of a card.

    Attributes:
        name: What it is, such as `eval_accuracy`; the metric, and behind a comma what sets it apart.
        value: The figure.
        command: What measured it.
    """

    name: str
    value: float
    command: str


def write_model_card(
    folder: str | os.PathLike,
    name: str | None = None,
    command: str | None = None,
    recipe: dict[str, Any] | None = None,
    datasets: Sequence[str] = (),
    base_model: str | None = None,
    license: str = "unknown",
    language: str | None = None,
    tags: Sequence[str] = (),
    results: list[Result] | None = None,
    summary: str | None = None,
    limits: str = LIMITS,
) -> ModelCard:
    """Writes `README.md` in the folder of a checkpoint.

    Args:
        folder: Holds `config.json`, and may hold `model.safetensors` and, with the results of a run,
            `all_results.json`.
        name: What the model is called; the folder's name if not given.
        command: The command that made it. Tokens for the Hub, the current folder and the home folder are taken out.
        recipe: What the command's recipe file holds.
        datasets: What the data are: datasets on the Hub, files, or words; only the first go in the front matter's
            list.
        base_model: The model that it was made from: a name on the Hub, or a folder, of which only the last part is
            written.
        license: Of the weights, as the Hub spells it.
        language: Of the texts, as in ISO 639-1.
        tags: Beside those that follow from the configuration.
        results: Figures with their commands; those of `all_results.json` with `command` if not given.
        summary: What the model is, in half a sentence.
        limits: What a user has to know.

    Returns:
        The card.

    Raises:
        ValueError: If there is no `config.json`.
    """
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    architecture = next(iter(config.get("architectures") or []), "")
    if not config:
        raise ValueError(f"{folder} has no config.json: save the model there first")
    rest = next((rest for rest in TASKS if architecture.endswith(rest)), "Model")
    task, auto_class, intended_use = TASKS[rest]
    name = name or folder.resolve().name
    if command:  # where things lie on a disk is nobody's business
        command = SECRETS.sub(r"\1\2...", command).replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")
    shown = {field: value for field, value in (recipe or {}).items() if field not in SECRET_FIELDS}
    if results is None:
        figures = _read_json(folder / "all_results.json")
        results = [Result(figure, value, "as above") for figure, value in figures.items() if _is_result(figure, value)]
    on_the_hub = [data for data in datasets if _may_be_on_the_hub(data)]
    datasets = [_last_part(data) for data in datasets]
    measured = {result.name.removeprefix("eval_"): result.value for result in results}
    evaluated_on = (on_the_hub or datasets or ["unknown"])[0]
    card_data = ModelCardData(
        language=language,
        license=license,
        library_name="transformers",
        tags=sorted({config["model_type"], *tags, *(["custom_code"] if "auto_map" in config else [])}),
        datasets=on_the_hub or None,
        metrics=sorted({_metric_type(metric) for metric in measured}) or None,
        pipeline_tag=task,
        base_model=base_model if base_model and _may_be_on_the_hub(base_model) else None,
        model_name=name,
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=evaluated_on,
                dataset_name=evaluated_on,
                metric_type=_metric_type(metric),
                metric_name=metric,
                metric_value=value,
            )
            for metric, value in measured.items()
        ]
        or None,
    )
    card = ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        name=name,
        config=config,
        task=task,
        architecture=architecture,
        auto_class=auto_class,
        has_tokenizer=any(folder.glob("tokenizer*")),
        parameters=_million_parameters(folder),
        longest=config.get("max_position_embeddings"),
        intended_use=intended_use,
        summary=summary,
        limits=limits,
        command=command,
        recipe=json.dumps(shown, indent=2) if shown else None,
        datasets=datasets,
        base_model=_last_part(base_model) if base_model else None,
        versions=", ".join(f"{package} {version(package)}" for package in ("linformer_hf", "transformers", "torch")),
        results=[Result(r.name, float(f"{r.value:.4g}"), r.command) for r in results],
    )
    temporary = folder / ".tmp-README.md"
    card.save(temporary)
    os.replace(temporary, folder / "README.md")
    return card


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError):  # there is none, or it is broken
        return {}


def _metric_type(name: str) -> str:
    """The metric that a figure is of."""
    return name.partition(",")[0].removesuffix("_mm")


def _is_result(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and not NO_RESULTS.fullmatch(name)


def _may_be_on_the_hub(name: str) -> bool:
    """Whether a name is that of a model or dataset on the Hub, and not of a file or folder, or just words."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _last_part(name: str) -> str:
    """A folder's or file's name without the folders that it lies in, which are nobody's business."""
    return Path(name).name if Path(name).exists() else name


def _million_parameters(folder: Path) -> str:
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no dict)
                total += math.prod(tensors.get_slice(name).get_shape())
    return f"{total / 1e6:.3g}" if total else "unknown"


__all__ = ["Result", "write_model_card"]
