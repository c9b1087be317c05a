"""Arguments, tasks, data, model and metrics of the GLUE scripts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import evaluate
import numpy as np
from accelerate import PartialState
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    default_data_collator,
)

from linformer_hf import training
from linformer_hf.training import logger


class Task(NamedTuple):
    """Where the data of a task are; a suffix such as `_mm` tells apart the splits of one kind."""

    text_columns: tuple[str, ...]
    dataset: str = "nyu-mll/glue"
    regression: bool = False
    validation: dict[str, str] = {"": "validation"}  # noqa: RUF012 (a NamedTuple's default, never changed)
    test: dict[str, str] = {"": "test"}  # noqa: RUF012


_PAIR = ("sentence1", "sentence2")
TASKS = {
    "cola": Task(("sentence",)),
    "sst2": Task(("sentence",)),
    "mrpc": Task(_PAIR),
    "qqp": Task(("question1", "question2")),
    "stsb": Task(_PAIR, regression=True),
    "mnli": Task(
        ("premise", "hypothesis"),
        validation={"": "validation_matched", "_mm": "validation_mismatched"},
        test={"": "test_matched", "_mm": "test_mismatched"},
    ),
    "qnli": Task(("question", "sentence")),
    "rte": Task(_PAIR),
    "wnli": Task(_PAIR),
    "imdb": Task(("text",), dataset="stanfordnlp/imdb", validation={"": "test"}),
}


@dataclass
class ModelArguments(training.ModelArguments):
    """Which model and tokenizer to start from."""

    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Begin with a new head where the checkpoint's has another number of labels."}
    )


@dataclass
class DataArguments:
    """Which task or files to learn, and how to read them."""

    task_name: str | None = field(default=None, metadata={"help": f"One of {', '.join(TASKS)}."})
    dataset_name: str | None = field(default=None, metadata={"help": "Folder or Hub name of another dataset."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(default=None, metadata={"help": "Your own data: csv, tsv, json or jsonl."})
    validation_file: str | None = field(default=None, metadata={"help": "Data to evaluate on."})
    test_file: str | None = field(default=None, metadata={"help": "Data to predict; needs no labels."})
    text_column_names: str | None = field(
        default=None,
        metadata={"help": "One or two text columns, as in a,b; sentence1,sentence2 or text or those with strings."},
    )
    label_column_name: str = field(default="label", metadata={"help": "Column with the labels."})
    do_regression: bool | None = field(
        default=None,
        metadata={
            "help": "Learn numbers, not classes; the default for labels with a decimal point.",
            **{"nargs": "?", "const": True},  # so that it needs no value
        },
    )
    max_seq_length: int | None = field(
        default=None, metadata={"help": "Tokens per example, longer ones are cut; the longest input of the model."}
    )
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "Pad to --max_seq_length instead of to the longest example of a batch."}
    )
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes for tokenizing."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only that many training examples."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use only that many validation examples."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Use only that many test examples."})


@dataclass
class GlueSetup:
    """What both scripts train with. `validation` and `test` hold a dataset for each suffix, see `Task`.

    `truncated` has the figures for the results: how many examples were cut, in all and in each split.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train_dataset: Any
    validation: dict[str, Any]
    test: dict[str, Any]
    collator: Callable
    compute_metrics: Callable[[EvalPrediction], dict[str, float]]
    label_names: list[str] | None
    truncated: dict[str, int]
    task_name: str | None
    card: dict[str, Any]


def prepare(model_args: ModelArguments, data_args: DataArguments, args: Any) -> GlueSetup:
    """Loads everything that a GLUE script needs; every mistake in the arguments shows here, before training.

    Args:
        model_args: The model arguments.
        data_args: The data arguments.
        args: The training arguments.

    Returns:
        Model, tokenizer, data, collator and metrics.
    """
    if data_args.task_name and data_args.task_name not in TASKS:
        raise ValueError(f"--task_name {data_args.task_name} is unknown; choose one of {', '.join(TASKS)}")
    if not model_args.model_name_or_path:
        raise ValueError("No model to fine-tune: pass --model_name_or_path")
    task = TASKS.get(data_args.task_name or "")
    splits = load_splits(data_args, args, task, model_args.cache_dir)
    labelled = {split: data for split, data in splits.items() if not split.startswith("test")}
    for split, data in labelled.items():
        check_labels(data, split, data_args.label_column_name)
    options = model_args.hub_options()
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, **options)
    overrides = training.parse_overrides(model_args.config_overrides)
    training.check_overrides(config, overrides)
    regression = data_args.do_regression
    if regression is None:
        kinds = [is_float(data, data_args.label_column_name) for data in labelled.values()]
        regression = task.regression if task else kinds[0] if kinds else config.problem_type == "regression"
    label_names = None
    if regression:
        overrides |= {"num_labels": 1, "problem_type": "regression"}
    else:
        label_names = find_label_names(labelled, data_args.label_column_name, config)
        overrides |= {
            "id2label": dict(enumerate(label_names)),
            "label2id": {name: index for index, name in enumerate(label_names)},
            "problem_type": "single_label_classification",
        }
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path, **options)
    model = load_model(model_args, args, tokenizer, overrides)
    with PartialState().main_process_first():
        encoded, truncated = encode_splits(splits, data_args, task, model, tokenizer, label_names)
    metric_name = data_args.task_name or ("regression" if regression else "classification")
    return GlueSetup(
        model=model,
        tokenizer=tokenizer,
        train_dataset=encoded.get("train"),
        validation=with_suffix(encoded, "validation"),
        test=with_suffix(encoded, "test"),
        collator=default_data_collator if data_args.pad_to_max_length else DataCollatorWithPadding(tokenizer),
        compute_metrics=metric_function(metric_name, regression),
        label_names=label_names,
        truncated=truncated,
        task_name=data_args.task_name,
        card={"dataset": data_args.train_file or data_args.dataset_name or (task.dataset if task else None)},
    )


def load_model(
    model_args: ModelArguments, args: Any, tokenizer: PreTrainedTokenizerBase, overrides: dict[str, Any]
) -> PreTrainedModel:
    """Loads the model, and checks that checkpoint, labels and tokenizer fit together.

    Args:
        model_args: The model arguments.
        args: The training arguments; without training nothing may be new.
        tokenizer: The tokenizer.
        overrides: Values of the config to set.

    Returns:
        The model, with an embedding for each token.
    """
    name, options = model_args.model_name_or_path, model_args.hub_options()
    if tokenizer.pad_token is None:
        raise ValueError(
            f"The tokenizer of {model_args.tokenizer_name or name} has no padding token, which batches need: "
            "set its pad_token and save it, or pass another --tokenizer_name"
        )
    model, found = AutoModelForSequenceClassification.from_pretrained(
        name,
        config=AutoConfig.from_pretrained(name, **options, **overrides),
        ignore_mismatched_sizes=True,  # so that the message below can say what to do
        attn_implementation=model_args.attn_implementation,
        output_loading_info=True,
        **options,
    )
    mismatched = sorted((key, tuple(old), tuple(new)) for key, old, new in found["mismatched_keys"])
    if mismatched and not model_args.ignore_mismatched_sizes:
        key, old, new = mismatched[0]
        raise ValueError(
            f"{key} has the shape {old} in {name}, and {new} with the {model.config.num_labels} labels of these data: "
            "to train a new head for other labels, pass --ignore_mismatched_sizes; otherwise correct the labels or "
            "--config_overrides"
        )
    if (
        args.do_predict
        and not args.do_train
        and (new := sorted({key for key, *_ in mismatched} | found["missing_keys"]))
    ):
        raise ValueError(
            f"--do_predict with {name} would write random labels, as it has no trained {new[0]}: "
            "train it on labelled data first, with --do_train"
        )
    known = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > known:
        if not args.do_train:
            raise ValueError(
                f"The tokenizer of {model_args.tokenizer_name or name} has {len(tokenizer)} tokens, and {name} "
                f"embeddings for {known}: pass the --tokenizer_name it was trained with, or train with --do_train"
            )
        logger.warning(
            "The tokenizer has %d tokens, more than the %d of the model, which get new embeddings",
            len(tokenizer),
            known,
        )
        model.resize_token_embeddings(len(tokenizer))
    return model


def with_suffix(splits: dict[str, Any], kind: str) -> dict[str, Any]:
    """The splits of a kind by suffix: those of `validation` and `validation_mm` under "" and "_mm"."""
    return {split.removeprefix(kind): data for split, data in splits.items() if split.startswith(kind)}


def load_splits(data_args: DataArguments, args: Any, task: Task | None, cache_dir: str | None) -> dict[str, Any]:
    """Loads the splits that are needed.

    Args:
        data_args: The data arguments.
        args: The training arguments; they say which splits are needed.
        task: The GLUE task, if any.
        cache_dir: Where prepared data are kept.

    Returns:
        Data under `train`, `validation` and `test`, with a suffix if there are several of a kind.
    """
    files = {"train": data_args.train_file, "validation": data_args.validation_file, "test": data_args.test_file}
    if any(files.values()):
        loaded = training.load_data_files(cache_dir, **files)
        names = {kind: {"": kind} for kind in files}
    elif task or data_args.dataset_name:
        name = data_args.dataset_name or (task.dataset if task else "")
        config_name = data_args.task_name if name == "nyu-mll/glue" else data_args.dataset_config_name
        loaded = datasets.load_dataset(name, config_name, cache_dir=cache_dir)
        task = task or Task(())
        names = {"train": {"": "train"}, "validation": task.validation, "test": task.test}
    else:
        raise ValueError("No data: pass --task_name, --dataset_name or --train_file")
    splits = {}
    for kind, needed, limit in (
        ("train", args.do_train, data_args.max_train_samples),
        ("validation", args.do_eval, data_args.max_eval_samples),
        ("test", args.do_predict, data_args.max_predict_samples),
    ):
        for suffix, split in names[kind].items() if needed else ():
            if split not in loaded:
                raise ValueError(f"There are no {kind} data: pass --{kind}_file, or leave out what needs them")
            data = loaded[split]
            splits[kind + suffix] = data.take(min(limit, len(data))) if limit else data
    return splits


def is_float(data: datasets.Dataset, column: str) -> bool:
    """Whether the values of a column have a decimal point."""
    return getattr(data.features[column], "dtype", "").startswith("float")


def check_labels(data: datasets.Dataset, split: str, column: str) -> None:
    """Refuses data without labels, and labels that are neither texts nor numbers.

    Args:
        data: The data of a split.
        split: Its name.
        column: The label column.
    """
    if column not in data.column_names:
        raise ValueError(
            f"The {split} data have no column {column!r} but {', '.join(data.column_names)}: pass --label_column_name"
        )
    feature = data.features[column]
    unlabelled = -1 if isinstance(feature, datasets.ClassLabel) else None
    for row, value in enumerate(data[column]):
        if value is None or value == unlabelled or (isinstance(value, float) and math.isnan(value)):
            raise ValueError(
                f"Row {row} of the {split} data has no value in {column!r}: fill it or delete the row. In csv and tsv "
                "files the words None, NA, nan and null also count as no value: use other words, or a json file"
            )
        if isinstance(value, (list, dict)):
            raise ValueError(
                f"Row {row} of the {split} data has {value!r} in {column!r}: each row needs one label, a text or a "
                "number; choose one, or name another column with --label_column_name"
            )
    if not isinstance(feature, (datasets.Value, datasets.ClassLabel)):
        first, row, other = first_of_another_type(data[column])
        raise ValueError(
            f"The {split} data have labels of several types in {column!r}, {first!r} in row 0 but {other!r} in "
            f"row {row}: write all as texts or all as numbers"
        )


def first_of_another_type(values: Any) -> tuple[Any, int, Any]:
    """The first value, and the row and value of the first that has another type."""
    first = values[0]
    return first, *next(
        ((row, value) for row, value in enumerate(values) if type(value) is not type(first)), (0, first)
    )


def regression_targets(data: datasets.Dataset, split: str, column: str) -> list[float]:
    """The labels of all rows as numbers, for a regression."""
    targets = []
    for row, value in enumerate(data[column]):
        try:
            target = float(value)
        except (TypeError, ValueError):
            target = math.nan
        if not math.isfinite(target):
            raise ValueError(
                f"Row {row} of the {split} data has {value!r} in {column!r}, and a regression needs a finite number: "
                "correct it, or learn classes with --do_regression false"
            )
        targets.append(target)
    return targets


def label_texts(data: datasets.Dataset, column: str) -> list[str]:
    """The names of the labels of all rows."""
    feature = data.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return [feature.int2str(value) for value in data[column]]
    return [str(value) for value in data[column]]


def find_label_names(labelled: dict[str, Any], column: str, config: Any) -> list[str]:
    """The label names in the order of their indices, checked against every split.

    Args:
        labelled: The splits with labels.
        column: The label column.
        config: The model's config; its order is kept if it already knows these labels.

    Returns:
        The names.
    """
    known = sorted(config.label2id or {}, key=config.label2id.get)
    generic = all(name.startswith("LABEL_") for name in known)
    present = {split: set(label_texts(data, column)) for split, data in labelled.items()}
    feature = next((data.features[column] for data in labelled.values()), None)
    if isinstance(feature, datasets.ClassLabel) and ("train" in labelled or generic):
        names = feature.names
    elif "train" in labelled:
        names = sorted(present["train"], key=int if feature.dtype.startswith("int") else str)
    elif present and generic:
        raise ValueError("The model does not know its label names: train it on labelled data first, with --do_train")
    else:
        names = known
    if "train" in labelled and len(names) < 2:  # such a model could be saved, but not loaded again
        raise ValueError(
            f"All train data have the label {names[0]!r} in {column!r}: add examples with another label, "
            "or name another column with --label_column_name"
        )
    if set(names) == set(known):
        names = known
    for split, found in present.items():
        if unseen := sorted(found - set(names)):
            raise ValueError(
                f"The {split} data have labels that are not among the {len(names)} known ones: "
                f"{', '.join(unseen[:10])}. Correct them, or add training examples with them"
            )
    return names


def encode_splits(
    splits: dict[str, Any],
    data_args: DataArguments,
    task: Task | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    label_names: list[str] | None,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Tokenizes all splits.

    Args:
        splits: From `load_splits`.
        data_args: The data arguments.
        task: The GLUE task, if any.
        model: The model; it limits the length.
        tokenizer: The tokenizer.
        label_names: The label names, or None for a regression.

    Returns:
        The encoded splits, and how many examples were truncated, as in `GlueSetup`.
    """
    limit = min(training.longest_input(model) or tokenizer.model_max_length, tokenizer.model_max_length)
    max_seq_length = data_args.max_seq_length or limit
    if max_seq_length > limit:
        raise ValueError(
            f"--max_seq_length {max_seq_length} is more than the {limit} tokens that model and tokenizer take: "
            f"pass at most {limit}"
        )
    column = data_args.label_column_name
    one_type = getattr(model.config, "type_vocab_size", 2) < 2 and "token_type_ids" in tokenizer.model_input_names
    if one_type:
        logger.info("The token_type_ids of the tokenizer are left out, as the model has one token type only")
    encoded, truncated = {}, {"truncated_examples": 0}
    for split, data in splits.items():
        columns = find_text_columns(data, split, data_args, task)
        labels = None
        if not split.startswith("test"):
            labels = regression_targets(data, split, column) if label_names is None else label_texts(data, column)
            if label_names is not None:
                index = {name: number for number, name in enumerate(label_names)}
                labels = [index[name] for name in labels]
        data = data.select_columns(list(columns)).map(
            encode,
            batched=True,
            remove_columns=list(columns),
            fn_kwargs={
                "tokenizer": tokenizer,
                "columns": columns,
                "max_seq_length": max_seq_length,
                "padding": "max_length" if data_args.pad_to_max_length else False,
                "options": {"return_token_type_ids": False} if one_type else {},
            },
            num_proc=data_args.preprocessing_num_workers,
            load_from_cache_file=not data_args.overwrite_cache,
            desc=f"Tokenize {split} examples",
        )
        count = sum(data["truncated"])
        if count:
            logger.warning(
                "%d of %d %s examples have more than %d tokens and are truncated",
                count,
                len(data),
                split,
                max_seq_length,
            )
        truncated[f"truncated_{split}_examples"] = count
        truncated["truncated_examples"] += count
        data = data.remove_columns("truncated")
        encoded[split] = data if labels is None else data.add_column("labels", labels)
    return encoded, truncated


def find_text_columns(
    data: datasets.Dataset, split: str, data_args: DataArguments, task: Task | None
) -> tuple[str, ...]:
    """The one or two columns with text.

    Args:
        data: The data of a split.
        split: Its name.
        data_args: The data arguments.
        task: The GLUE task, if any.

    Returns:
        Their names.
    """
    names = data.column_names
    if data_args.text_column_names:
        columns = tuple(name.strip() for name in data_args.text_column_names.split(","))
    elif task and task.text_columns:
        columns = task.text_columns
    elif set(_PAIR) <= set(names):
        columns = _PAIR
    elif "text" in names:
        columns = ("text",)
    else:
        strings = [name for name, kind in data.features.items() if "string" in str(getattr(kind, "dtype", ""))]
        columns = tuple(name for name in strings if name != data_args.label_column_name)
    if not 1 <= len(columns) <= 2 or not set(columns) <= set(names):
        raise ValueError(
            f"Text in {', '.join(columns) or 'no column'}, of the columns {', '.join(names)}: "
            "name the one or two text columns with --text_column_names"
        )
    for column in columns:
        kind = getattr(data.features[column], "dtype", None) or type(data.features[column]).__name__
        if "string" not in kind and kind != "null":  # the latter if all rows are empty
            raise ValueError(
                f"The text column {column!r} of the {split} data holds {kind}, as {data[column][0]!r} in row 0: "
                "name one with texts with --text_column_names, or write the values as strings, in a json file"
            )
    return columns


def encode(
    batch: dict[str, list],
    tokenizer: PreTrainedTokenizerBase,
    columns: tuple[str, ...],
    max_seq_length: int,
    padding: str | bool,
    options: dict[str, Any],
) -> dict[str, list]:
    """Tokenizes a batch, and marks the examples that had to be truncated.

    Args:
        batch: The rows.
        tokenizer: The tokenizer.
        columns: The text columns.
        max_seq_length: The longest example, in tokens.
        padding: As for the tokenizer.
        options: More options of the tokenizer.

    Returns:
        The tokenizer's columns, and `truncated`.
    """
    texts = [[text or "" for text in batch[column]] for column in columns]
    encoded = tokenizer(*texts, verbose=False, **options)
    truncated = [len(tokens) > max_seq_length for tokens in encoded["input_ids"]]
    if padding or any(truncated):
        encoded = tokenizer(*texts, truncation=True, max_length=max_seq_length, padding=padding, **options)
    return {**encoded, "truncated": truncated}


def metric_function(name: str, regression: bool) -> Callable[[EvalPrediction], dict[str, float]]:
    """The metrics of a task, in the form that the Trainer takes.

    Args:
        name: A configuration of `glue_metrics.py`.
        regression: Whether logits are values.

    Returns:
        A function from logits and labels to figures by name.
    """
    metric = evaluate.load(str(Path(__file__).with_name("glue_metrics.py")), name, keep_in_memory=True)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        logits = prediction.predictions
        logits = logits[0] if isinstance(logits, tuple) else logits
        predictions = logits.squeeze(-1) if regression else np.argmax(logits, axis=-1)
        return metric.compute(predictions=predictions, references=prediction.label_ids)

    return compute_metrics


def write_predictions(setup: GlueSetup, suffix: str, logits: np.ndarray, output_dir: str) -> None:
    """Writes one prediction per line, with label names, beside its index.

    Args:
        setup: From `prepare`.
        suffix: Of the test split.
        logits: (number of examples, number of labels).
        output_dir: The folder of the run.
    """
    if not PartialState().is_main_process:
        return
    if setup.label_names is None:
        values = [f"{value:.4f}" for value in logits.squeeze(-1)]
    else:
        values = [setup.label_names[index] for index in np.argmax(logits, axis=-1)]
    name = "_".join(filter(None, ["predict_results", setup.task_name])) + suffix
    lines = ["index\tprediction", *(f"{index}\t{value}" for index, value in enumerate(values))]
    file = Path(output_dir, f"{name}.txt")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    logger.info("Wrote %d predictions to %s", len(values), file)
