"""What the training scripts in `examples/` share, apart from their data.

Arguments and recipe files, output folders that are never left half written, a `Trainer` and an Accelerate loop that
resume exactly, and the figures and files that every run leaves behind.
"""

import contextlib
import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import types
import typing
import zipfile
import zlib
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub import HfApi
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import CONFIG_MAPPING, HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, get_scheduler
from transformers.integrations import is_tensorboard_available
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, rotate_checkpoints, sort_checkpoints
from transformers.utils import CONFIG_NAME

from .configuration_linformer import LinformerConfig
from .model_card import write_model_card


try:
    import datasets
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration
except ImportError as error:
    raise ImportError(f"{__name__} needs more packages: pip install 'linformer_hf[examples]'") from error


logger = logging.getLogger(__name__)

RESULTS_NAME = "all_results.json"
LOSS_CURVE_NAME = "loss_curve.png"


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------

_OVERWRITE_HELP = "Train anew in a folder that holds a run: its checkpoints are deleted when training starts."


def check_at_least(args: Any, smallest: int, *names: str) -> None:
    """Refuses arguments that are too small.

    Args:
        args: The dataclass with the arguments.
        smallest: The smallest value that is allowed.
        *names: The arguments to check; None is allowed.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise ValueError(f"--{name} is {value}, but must be at least {smallest}")


@dataclass
class ModelArguments:
    """Which model and tokenizer to start from."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or Hub name of the checkpoint to start from."}
    )
    config_overrides: dict | str | None = field(
        default=None,
        metadata={"help": "Config values that replace the defaults or the checkpoint's, as in `a=1,b=[2,3],c=gelu`."},
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={"help": "eager, sdpa, ...; sdpa if not given. On CPUs eager is faster on short texts"},
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Folder or Hub name of the tokenizer, if it is not the model's."}
    )
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads and prepared data are kept."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model on the Hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the code that comes with a Hub model."})

    def hub_options(self) -> dict[str, Any]:
        """The options that every `from_pretrained` of a script takes."""
        return {
            "cache_dir": self.cache_dir,
            "revision": self.model_revision,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """Those of Transformers, with `overwrite_output_dir` of version 4 and defaults that fit what is there.

    TensorBoard is on where it is installed, and a machine without a GPU needs no flag for that.
    """

    output_dir: str = field(default="trainer_output", metadata={"help": "Folder for the model and the checkpoints."})
    report_to: list[str] | str | None = field(  # in an order that HfArgumentParser can read
        default="tensorboard" if is_tensorboard_available() else "none",
        metadata={"help": "Where to log to: tensorboard, wandb, ..., all or none."},
    )
    use_cpu: bool = field(
        default=not torch.accelerator.is_available(),
        metadata={"help": "Stay on the CPU; on if there is nothing else."},
    )
    dataloader_pin_memory: bool = field(
        default=torch.accelerator.is_available(), metadata={"help": "Pin memory in data loaders; off without a GPU."}
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": _OVERWRITE_HELP})

    def __post_init__(self) -> None:
        check_at_least(self, 1, "per_device_train_batch_size", "gradient_accumulation_steps")
        super().__post_init__()
        self.command: str | None = None
        self.recipe: dict[str, Any] | None = None


@dataclass
class AccelerateArguments:
    """The part of `TrainingArguments` that the Accelerate scripts follow, under the same names.

    So one recipe file serves both scripts of a pair. The names that Transformers' own `no_trainer` scripts use
    (`--max_train_steps`, `--num_warmup_steps`, `--checkpointing_steps`) are accepted on the command line as well.
    """

    output_dir: str = field(default="trainer_output", metadata={"help": "Folder for the model and the checkpoints."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": _OVERWRITE_HELP})
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "A checkpoint folder, or `true` for the newest one in the output folder."}
    )
    do_train: bool = field(default=False, metadata={"help": "Train."})
    do_eval: bool = field(default=False, metadata={"help": "Evaluate on the validation data."})
    do_predict: bool = field(default=False, metadata={"help": "Write predictions for the test data."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Examples per device and forward pass."})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "The same, for evaluation."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Forward passes for each optimizer step."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Highest learning rate of AdamW."})
    weight_decay: float = field(default=0.0, metadata={"help": "Of all weights but biases and layer norms."})
    adam_beta1: float = field(default=0.9, metadata={"help": "Beta1 of AdamW."})
    adam_beta2: float = field(default=0.999, metadata={"help": "Beta2 of AdamW."})
    adam_epsilon: float = field(default=1e-8, metadata={"help": "Epsilon of AdamW."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm; 0 for never."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the training data."})
    max_steps: int = field(
        default=-1, metadata={"help": "Optimizer steps, in place of epochs.", "aliases": ["--max_train_steps"]}
    )
    lr_scheduler_type: str = field(default="linear", metadata={"help": "linear, cosine, constant_with_warmup, ..."})
    warmup_steps: float = field(
        default=0, metadata={"help": "Steps of warmup; below 1, a share of all.", "aliases": ["--num_warmup_steps"]}
    )
    logging_steps: int = field(default=500, metadata={"help": "Optimizer steps between two logged losses."})
    eval_strategy: Literal["no", "steps", "epoch"] = field(
        default="no", metadata={"help": "Evaluate in training: no, steps or epoch."}
    )
    eval_steps: int | None = field(default=None, metadata={"help": "As logging_steps, unless given."})
    save_strategy: Literal["no", "steps", "epoch"] = field(
        default="steps", metadata={"help": "Save checkpoints: no, steps or epoch."}
    )
    save_steps: int = field(
        default=500,
        metadata={"help": "Optimizer steps between two checkpoints.", "aliases": ["--checkpointing_steps"]},
    )
    save_total_limit: int | None = field(default=None, metadata={"help": "Keep only that many checkpoints."})
    seed: int = field(default=42, metadata={"help": "Of everything random."})
    bf16: bool = field(default=False, metadata={"help": "bfloat16 mixed precision."})
    fp16: bool = field(default=False, metadata={"help": "float16 mixed precision."})
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that load data."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bars."})
    report_to: str = field(
        default="tensorboard" if is_tensorboard_available() else "none",
        metadata={"help": "Where to log to: tensorboard, wandb, ..., all or none."},
    )
    push_to_hub: bool = field(default=False, metadata={"help": "Upload the final model to the Hub."})
    hub_model_id: str | None = field(
        default=None, metadata={"help": "Its name there; the output folder's if not set."}
    )
    hub_token: str | None = field(default=None, metadata={"help": "Token for the Hub, if you are not logged in."})

    def __post_init__(self) -> None:
        check_at_least(self, 1, "per_device_train_batch_size", "per_device_eval_batch_size")
        check_at_least(self, 1, "gradient_accumulation_steps", "logging_steps", "eval_steps", "save_steps")
        self.command: str | None = None
        self.recipe: dict[str, Any] | None = None
        self.do_eval = self.do_eval or self.eval_strategy != "no"  # as in TrainingArguments

    def accelerator(self) -> Accelerator:
        """The `Accelerator` that these arguments describe."""
        AcceleratorState._reset_state()  # a second run in the same process may have another precision
        precision = "bf16" if self.bf16 else "fp16" if self.fp16 else "no"
        return Accelerator(
            cpu=not torch.accelerator.is_available(),
            mixed_precision=precision,
            log_with=None if self.report_to == "none" else self.report_to,
            project_dir=self.output_dir,
            # The order of the examples then depends on seed and epoch only, which is what resuming needs.
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=self.seed),
        )


def parse_arguments(*dataclass_types: Any, argv: list[str] | None = None) -> tuple[Any, ...]:
    """Reads flags, or a recipe file with the flags that change it.

    Args:
        dataclass_types: The argument dataclasses to fill.
        argv: Flags; the command line's if None. If the first one ends in `.json`, it names a recipe: a file with a
            JSON object whose keys are the long names of the flags. The flags after it win over it.

    Returns:
        One filled instance for each dataclass. Training arguments also get `command`, the command line, and
        `recipe`, what the recipe holds, for the model card.
    """
    parser = HfArgumentParser(dataclass_types)
    argv = list(sys.argv[1:] if argv is None else argv)
    script = Path(sys._getframe(1).f_code.co_filename).name  # not of `sys.argv`: one script may call another
    command = shlex.join(["python", script, *argv])
    recipe = {}
    if argv and argv[0].endswith(".json"):
        recipe_file = Path(argv.pop(0))
        if not recipe_file.is_file():
            raise ValueError(f"There is no recipe file {recipe_file}")
        recipe = _read_recipe(recipe_file, parser, dataclass_types)
        parser.set_defaults(**recipe)
    parsed = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    for arguments in parsed:
        if isinstance(arguments, TrainingArguments | AccelerateArguments):
            arguments.command, arguments.recipe = command, recipe
    return parsed


def _read_recipe(recipe_file: Path, parser: HfArgumentParser, dataclass_types: Any) -> dict[str, Any]:
    """The values of a recipe file, converted and checked as those of the flags are."""
    try:
        recipe = json.loads(recipe_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{recipe_file} is not a JSON file: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{recipe_file} holds a {type(recipe).__name__}, but must hold one JSON object")
    hints = {name: hint for kind in dataclass_types for name, hint in typing.get_type_hints(kind).items()}
    actions = {action.dest: action for action in reversed(parser._actions) if action.dest in hints}
    if unknown := sorted(set(recipe) - set(actions)):
        raise ValueError(f"{recipe_file} sets {', '.join(unknown)}, which this script does not know; see --help")
    for name, value in recipe.items():
        action = actions[name]
        try:
            recipe[name] = _recipe_value(action, hints[name], value)
        except (ArgumentTypeError, TypeError, ValueError) as error:
            kind = "true or false" if isinstance(action.default, bool) else getattr(action.type, "__name__", "")
            allowed = f"one of {', '.join(map(str, action.choices))}" if action.choices else kind
            raise ValueError(f"{recipe_file} sets {name} to {json.dumps(value)}, but it must be {allowed}") from error
    return recipe


def _recipe_value(action: Any, hint: Any, value: Any) -> Any:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [typing.get_origin(kind) or kind for kind in (typing.get_args(hint) if union else (hint,))]
    if isinstance(value, list) and action.nargs == "+":
        return [_recipe_value(action, action.type, item) for item in value]
    if value == action.default or (isinstance(value, dict | list | None) and type(value) in kinds):
        return action.default if value is None else value
    if isinstance(value, dict | list | None):
        raise TypeError(type(value))
    if isinstance(value, float) and value.is_integer() and action.type is int:
        value = int(value)
    converted = action.type(str(value))
    if action.choices and converted not in action.choices:
        raise ValueError(converted)
    return converted


def start_run(args: TrainingArguments | AccelerateArguments) -> str | None:
    """Begins a script: logging, seed, and a look at the output folder before anything is spent.

    Args:
        args: The script's training arguments.

    Returns:
        The checkpoint to resume from, if any.
    """
    # The first one in the process decides; without a GPU it has to be told to look for other processes.
    main_process = PartialState(cpu=not torch.accelerator.is_available()).is_main_process
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logger.setLevel(logging.INFO if main_process else logging.ERROR)
    if not main_process:
        datasets.utils.logging.disable_progress_bar()
    if not (args.do_train or args.do_eval or args.do_predict):
        raise ValueError("Nothing to do: pass --do_train, --do_eval or --do_predict")
    transformers.set_seed(args.seed)
    if not args.do_train:
        return None
    return prepare_output_dir(args.output_dir, args.overwrite_output_dir, args.resume_from_checkpoint)


# ---------------------------------------------------------------------------------------------------------------------
# Files and folders
# ---------------------------------------------------------------------------------------------------------------------


def load_data_files(cache_dir: str | None, streaming: bool = False, **files: str | None) -> dict[str, Any]:
    """Loads csv, tsv, json, jsonl or text files, one for each split.

    Args:
        cache_dir: Where prepared data are kept.
        streaming: Read on the fly instead.
        **files: The file of each split; None where there is none. `sample_by` goes to the reader of text files.

    Returns:
        The data of each split that has a file.

    Raises:
        ValueError: If a file is missing, empty, or of an unknown kind.
    """
    sample_by = files.pop("sample_by", None) or "line"
    loaded = {}
    for split, file in files.items():
        if file is None:
            continue
        if not Path(file).is_file():
            raise ValueError(f"--{split}_file {file} does not exist: check the path")
        with open(file, "rb") as handle:
            if not handle.read(4096).strip():
                raise ValueError(f"--{split}_file {file} is empty: it needs at least one example")
        kind = Path(file).suffix.lstrip(".")
        options: dict[str, Any] = {
            "csv": {"path": "csv"},
            "tsv": {"path": "csv", "sep": "\t"},
            "json": {"path": "json"},
            "jsonl": {"path": "json"},
            "txt": {"path": "text", "sample_by": sample_by},
        }.get(kind, {})
        if not options:
            raise ValueError(f"--{split}_file {file} ends in .{kind}; csv, tsv, json, jsonl and txt can be read")
        try:
            data = datasets.load_dataset(
                **options, data_files={split: file}, split=split, cache_dir=cache_dir, streaming=streaming
            )
        except (datasets.exceptions.DatasetGenerationError, ValueError) as error:  # the latter where there are no rows
            reason = error.__cause__ or error
            raise ValueError(f"--{split}_file {file} has no rows or cannot be read as {kind}: {reason}") from error
        loaded[split] = data
    return loaded


_VOCABULARY = r"tokenizer\.json|vocab.*|.*\.(model|vocab|tiktoken)"


def checkpoint_problem(checkpoint: str | os.PathLike) -> str | None:
    """Says why a checkpoint cannot be resumed from, without loading it.

    Args:
        checkpoint: The folder of the checkpoint.

    Returns:
        The reason, or None if every file is complete.
    """
    checkpoint = Path(checkpoint)
    try:
        files = {file.name: file for file in checkpoint.iterdir()}
        objects = {
            name: json.loads(files[name].read_text(encoding="utf-8")) for name in files if name.endswith(".json")
        }
        for name, file in files.items():
            if name.endswith(".safetensors"):
                with safe_open(file, framework="pt"):  # compares the header with the length of the file
                    pass
    except (OSError, ValueError, SafetensorError) as error:
        return str(error)
    if absent := sorted({"config.json", TRAINER_STATE_NAME} - set(objects)):
        return f"no {', '.join(absent)}"
    if not isinstance(objects[TRAINER_STATE_NAME], dict) or "global_step" not in objects[TRAINER_STATE_NAME]:
        return f"no global_step in {TRAINER_STATE_NAME}"
    # What torch.save writes is a zip file, whose directory comes last.
    torch_files = [name for name in files if Path(name).suffix in {".pt", ".pth", ".bin", ".pkl"}]
    if broken := sorted(name for name in torch_files if not zipfile.is_zipfile(files[name])):
        return f"{', '.join(broken)} cut short"

    def any_like(pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in files)

    for name, index in objects.items():
        if name.endswith(".index.json"):
            shards = dict(index).get("weight_map") or {name: "weight_map"}
            if absent := sorted(set(shards.values()) - set(files)):
                return f"no {', '.join(absent)}"
    # Of FSDP and DeepSpeed; the folders of the latter have the optimizer in them.
    folders = [name for name in files if re.match("pytorch_model|global_step", name) and files[name].is_dir()]
    if not (folders or any_like(r"(model|pytorch_model\w*)\.(safetensors|bin)(\.index\.json)?")):
        return "no weights"
    if any_like(r"tokenizer.*\.json") and not ("tokenizer_config.json" in files and any_like(_VOCABULARY)):
        return "no complete tokenizer"
    resumed = {"optimizer": "optimizer", "scheduler": "scheduler|custom_checkpoint", "random state": "rng|random"}
    absent = [what for what, pattern in resumed.items() if not any_like(f"({pattern})[._].*")]
    if len(absent) == len(resumed) and "training_args.bin" in files:
        logger.warning("%s was saved with --save_only_model: training starts with a new optimizer", checkpoint)
    elif absent and not any(re.fullmatch(r"pytorch_model|global_step\d+", name) for name in folders):
        return f"no {', '.join(absent)}"
    return None


def newest_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The newest checkpoint in a folder that is complete, or None."""
    for checkpoint in reversed(sort_checkpoints(str(output_dir))):
        problem = checkpoint_problem(checkpoint)
        if problem is None:
            return checkpoint
        logger.warning("Passing over %s: %s", checkpoint, problem)
    return None


def prepare_output_dir(
    output_dir: str | os.PathLike, overwrite: bool = False, resume_from_checkpoint: str | bool | None = None
) -> str | None:
    """Refuses a folder that already holds a run, unless the user said what to do with it. Changes nothing.

    Args:
        output_dir: The folder of the run.
        overwrite: Whether a new run may take its place.
        resume_from_checkpoint: A checkpoint to go on from, or True or `"true"` for the newest complete one.

    Returns:
        The checkpoint to resume from, or None.

    Raises:
        ValueError: If the folder is in use, or if there is no such checkpoint.
    """
    output_dir = Path(output_dir)
    resume = str(resume_from_checkpoint or "false")
    if resume.lower() == "true":
        checkpoint = newest_checkpoint(output_dir)
        if checkpoint is None:
            raise ValueError(f"{output_dir} has no complete checkpoint: leave out --resume_from_checkpoint to start")
        return checkpoint
    if resume.lower() != "false":
        if problem := checkpoint_problem(resume):
            raise ValueError(
                f"--resume_from_checkpoint {resume} cannot be loaded ({problem}); "
                "`--resume_from_checkpoint true` takes the newest complete checkpoint of the output folder"
            )
        return resume
    traces = (f"{PREFIX_CHECKPOINT_DIR}-*", "*.safetensors", TRAINER_STATE_NAME, RESULTS_NAME)
    if not overwrite and any(True for trace in traces for _ in output_dir.glob(trace)):
        raise ValueError(
            f"{output_dir} already holds a run: continue it with --resume_from_checkpoint true, replace it with "
            "--overwrite_output_dir, or choose another --output_dir"
        )
    return None


def remove_checkpoints(output_dir: str | os.PathLike) -> None:
    """Deletes the checkpoints of an earlier run, so that nobody resumes from them by mistake."""
    state = PartialState()
    if state.is_main_process:
        for checkpoint in sort_checkpoints(str(output_dir)):
            shutil.rmtree(checkpoint)
    state.wait_for_everyone()


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike, merge: bool = False) -> Iterator[Path]:
    """Gives a temporary folder and moves it into place once everything in it is written.

    A full disk or an interrupt in the middle leaves what was there before, and no temporary folder. Every process of a
    distributed run has to enter it.

    Args:
        path: The folder to write.
        merge: Whether the files go beside those that are already there, replacing those of the same name. Otherwise
            the folder is replaced as a whole.

    Yields:
        The temporary folder; it has the last name of `path`.

    Raises:
        OSError: If the content cannot be written.
    """
    path = Path(path)
    # On the same file system, so that the move is one rename.
    workspace = (path if merge else path.parent) / f".tmp-{path.name}"
    temporary, previous = workspace / path.name, workspace / "previous"
    state = PartialState()
    if state.is_main_process:
        shutil.rmtree(workspace, ignore_errors=True)
        temporary.mkdir(parents=True)
    state.wait_for_everyone()
    try:
        yield temporary
        state.wait_for_everyone()
        if state.is_main_process:
            _sync(temporary)
            if merge:
                for file in temporary.iterdir():
                    os.replace(file, path / file.name)
            else:
                if path.exists():
                    os.replace(path, previous)
                os.replace(temporary, path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        raise OSError(f"Could not save {path}: {error}. What was saved before is untouched.") from error
    finally:
        if state.is_main_process:
            if previous.exists() and not path.exists():
                os.replace(previous, path)
            shutil.rmtree(workspace, ignore_errors=True)
    state.wait_for_everyone()


def _sync(folder: Path) -> None:
    """Waits until the files are on the disk, where a full one may show only now."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())


def write_json(path: str | os.PathLike, data: Any) -> None:
    """Writes a JSON file that is there completely or not at all.

    Args:
        path: The file.
        data: What to write.
    """
    path = Path(path)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def plot_loss_curve(log_history: list[dict[str, float]], path: str | os.PathLike) -> None:
    """Draws training and validation loss over the steps.

    Args:
        log_history: That of a `TrainerState`.
        path: The PNG file to write; nothing is written if no loss was logged.
    """
    from matplotlib.figure import Figure  # without pyplot: no display needed, nothing global

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("eval_loss", "validation")):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 30 else None, markersize=3)
    if not axes.lines:
        return
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(path)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# Model and loss
# ---------------------------------------------------------------------------------------------------------------------


def parse_overrides(overrides: dict | str | None) -> dict[str, Any]:
    """Reads `--config_overrides`.

    Args:
        overrides: As in `a=1,b=[2,3],c=gelu`; or a dict, from a recipe file.

    Returns:
        The values by name.
    """
    if overrides is None or isinstance(overrides, dict):
        return dict(overrides or {})
    if not isinstance(overrides, str):
        raise ValueError(f"--config_overrides is {overrides!r}, but must be name=value,... or a JSON object")
    parsed = {}
    for item in re.split(r",(?![^\[]*\])", overrides):  # not at the commas of a list
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--config_overrides {overrides}: {item!r} is not of the form name=value")
        try:
            parsed[name.strip()] = json.loads(value.lower() if value in {"True", "False"} else value)
        except json.JSONDecodeError:
            parsed[name.strip()] = value
    return parsed


def check_overrides(
    config: transformers.PreTrainedConfig, overrides: dict[str, Any], trained_weights: bool = True
) -> None:
    """Refuses names that the config does not have, and values that trained projections do not fit.

    Args:
        config: A config of the model.
        overrides: What the user wants to set.
        trained_weights: Whether the model's weights will be loaded, rather than made anew.
    """
    if unknown := sorted(name for name in overrides if not hasattr(config, name)):
        raise ValueError(f"--config_overrides: {type(config).__name__} has no {', '.join(unknown)}")
    if not trained_weights or config.model_type != LinformerConfig.model_type:
        return
    fixed = ["projected_length", "projection_type", "projection_sharing", "max_position_embeddings"]
    pooling = {"mean_pooling", "max_pooling"}
    if {config.projection_type, overrides.get("projection_type", config.projection_type)} <= pooling:
        fixed = ["max_position_embeddings"]  # pooling has no weights
    for name in fixed:
        present, wanted = getattr(config, name), overrides.get(name)
        lengths = config.projected_lengths if name == "projected_length" else None
        if name in overrides and wanted != present and wanted != lengths and [wanted] * len(lengths or []) != lengths:
            raise ValueError(
                f"--config_overrides {name}={wanted}: the trained projections of the checkpoint have another shape, "
                f"that of {name}={present}. Train a new model (--config_name), or convert one (convert_encoder)"
            )


def longest_input(model: PreTrainedModel) -> int | None:
    """The number of tokens that the position embeddings of a model have room for, or None without a limit."""
    limit = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        # Those of the RoBERTa kind begin after the padding index, which takes up the first rows.
        if limit and name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return limit - module.padding_idx - 1
    return limit


def config_from_scratch(
    model_type: str, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, overrides: dict[str, Any]
) -> transformers.PreTrainedConfig:
    """The config of a new model that fits a tokenizer and a sequence length.

    Args:
        model_type: As in `CONFIG_MAPPING`, for example `"linformer"` or `"roberta"`.
        tokenizer: Gives vocabulary size and special tokens.
        max_seq_length: The longest input in tokens, special tokens included.
        overrides: Values to set on top.

    Returns:
        The config.
    """
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"--model_type {model_type} is unknown; among others there are linformer, roberta and bert")
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    # A baseline is one flag away from a Linformer: what only Linformers have is left out, and nothing else.
    ours = [name for name in overrides if not hasattr(default, name) and hasattr(LinformerConfig(), name)]
    if ours:
        logger.info("%s has no %s: left out", config_class.__name__, ", ".join(ours))
        overrides = {name: value for name, value in overrides.items() if name not in ours}
    check_overrides(default, overrides, trained_weights=False)
    values = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "max_position_embeddings": max_seq_length,
    }
    if "token_type_ids" in tokenizer.model_input_names:
        values["type_vocab_size"] = max(getattr(default, "type_vocab_size", 0), 2)
    values = {name: value for name, value in values.items() if hasattr(default, name)} | overrides
    projected_length = getattr(default, "projected_length", 0)
    if projected_length > max_seq_length and "projected_length" not in overrides:
        values["projected_length"] = max(max_seq_length // 2, 1)
        logger.info(
            "projected_length is %d, as its default of %d does not fit in --max_seq_length %d; "
            "choose it with --config_overrides projected_length=...",
            *(values["projected_length"], projected_length, max_seq_length),
        )
    config = config_class(**values)
    if "max_position_embeddings" in values and "max_position_embeddings" not in overrides:
        with torch.device("meta"):  # no memory, no time: only to see how positions are counted
            probe = transformers.AutoModelForMaskedLM.from_config(config_class(**values))
        config.max_position_embeddings += max_seq_length - (longest_input(probe) or max_seq_length)
    return config


def label_loss(
    outputs: Any,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The loss of a masked LM or a sequence classifier, divided by the labels of the whole accumulated batch.

    Models differ in whether they divide by `num_items_in_batch` or ignore it (in Transformers 5.24 RoBERTa ignores it,
    and its loss grows with the accumulation steps). Computing the loss here makes 8 x 1 equal 2 x 4 for each of them.

    Args:
        outputs: The model's outputs, with `logits` of shape (..., classes), or (b, 1) for a regression.
        labels: Class indices with -100 where there is no label, or float targets for a regression.
        num_items_in_batch: The number of labels to divide by; those in `labels` if None.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.

    Returns:
        The loss, a scalar.
    """
    logits = outputs["logits"]
    if labels.is_floating_point():
        total = nn.functional.mse_loss(logits.float().view_as(labels), labels.float(), reduction="sum")
        return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)
    labelled = labels != -100  # picked before the cast to float32: 15 % of the logits of a masked LM
    total = nn.functional.cross_entropy(
        logits[labelled].float(), labels[labelled], reduction="sum", label_smoothing=label_smoothing
    )
    return total / (labelled.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


def derived_seed(*parts: Any, data: bytes = b"") -> int:
    """A seed of 32 bits that depends on all arguments and nothing else."""
    return zlib.crc32(data, zlib.crc32(repr(parts).encode()))


def perplexity(loss: float) -> float:
    """exp(loss), or infinity where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Trainer
# ---------------------------------------------------------------------------------------------------------------------


class Trainer(transformers.Trainer):
    """`transformers.Trainer` that leaves no folder half written, and whose resumed runs end like uninterrupted ones.

    Checkpoints and the final model are written beside their place and moved. Evaluation leaves the random state as it
    was, a collator with `set_epoch` is told the epoch, and the sums behind the logged losses are kept in the
    checkpoints. The loss is `label_loss`.

    Args:
        eval_collator: Collator for evaluation, if it is not `data_collator`.
        **kwargs: As for `transformers.Trainer`.
    """

    args: TrainingArguments
    model: PreTrainedModel

    def __init__(self, *, eval_collator: Callable | None = None, **kwargs: Any):
        loss_function = partial(label_loss, label_smoothing=kwargs["args"].label_smoothing_factor)
        super().__init__(compute_loss_func=loss_function, **kwargs)
        self.eval_collator = eval_collator or self.data_collator
        self.add_callback(_RestoreRunningLoss(self))
        self._run_dir_in_use: str | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in `transformers.Trainer`; with `overwrite_output_dir`, the checkpoints of an earlier run go first."""
        if self.args.overwrite_output_dir and not resume_from_checkpoint:
            remove_checkpoints(self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """As in `transformers.Trainer`, with the collator for evaluation."""
        train_collator, self.data_collator = self.data_collator, self.eval_collator
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = train_collator

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As in `transformers.Trainer`; the random numbers of training are left alone."""
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if hasattr(self.data_collator, "set_epoch"):
            self.data_collator.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in `transformers.Trainer`; `train_loss` is the mean over the whole run, resumed or not."""
        if "train_loss" in logs:
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def _get_output_dir(self, trial: Any) -> str:
        return self._run_dir_in_use or super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._run_dir_in_use is None:  # only once the checkpoint is in its place
            for code in Path(checkpoint_folder).glob("*.py"):  # or the Hub could not load it
                shutil.copy(code, self.args.output_dir)
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_dir = Path(self._get_output_dir(trial))
        checkpoint = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        callbacks: Any = self.state.stateful_callbacks  # a dict by now
        callbacks[_RestoreRunningLoss.__name__] = {
            "total": self._total_loss_scalar,
            "not_logged": self.accelerator.gather(self._tr_loss).mean().item(),
            "last_logged": self._globalstep_last_logged,
        }
        with atomic_directory(checkpoint) as temporary:
            self._run_dir_in_use = str(temporary.parent)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._run_dir_in_use = None
            best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best == checkpoint or best.is_dir():
                self.state.best_model_checkpoint = str(best)
                if self.args.should_save:
                    self.state.save_to_json(str(temporary / TRAINER_STATE_NAME))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if self.args.should_save:
            best_checkpoint = self.state.best_model_checkpoint
            rotate_checkpoints(str(run_dir), self.args.save_total_limit, best_checkpoint, use_mtime=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `transformers.Trainer`, but an interrupt in the middle leaves what was there before."""
        if self._run_dir_in_use is not None:
            super().save_model(output_dir, _internal_call)
            return
        with atomic_directory(output_dir or self.args.output_dir, merge=True) as temporary:
            super().save_model(str(temporary), _internal_call=True)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def create_model_card(self, dataset: str | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Writes README.md with `write_model_card`.

        Args:
            dataset: What the model was trained on.
            **kwargs: As in `transformers.Trainer`; `license`, `language` and `tags` are used.
        """
        if not Path(self.args.output_dir, CONFIG_NAME).is_file():  # adapters
            super().create_model_card(dataset=dataset, **kwargs)
        elif self.is_world_process_zero():
            _write_model_card(self.args, self.model, dataset, **kwargs)

    def finish(self, results: dict[str, float], **card: Any) -> dict[str, float]:
        """Writes what a run leaves behind, and uploads it if asked to.

        Args:
            results: The figures for `all_results.json`.
            **card: As for `create_model_card`.

        Returns:
            `results`.
        """
        if self.args.do_train:
            self.save_model(_internal_call=True)
            self.save_state()
        if self.is_world_process_zero():
            write_results(self.args.output_dir, results, self.state.log_history if self.args.do_train else None)
        if self.args.push_to_hub:
            self.push_to_hub(**card)
        elif self.args.do_train:
            self.create_model_card(**card)
        return results


class _RestoreRunningLoss(transformers.TrainerCallback):
    """Gives a resumed run the loss sums of the steps before it, so that it logs what an uninterrupted one logs."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sums = state.stateful_callbacks.get(type(self).__name__)
        if sums is not None:
            self.trainer._total_loss_scalar = sums["total"]
            self.trainer._tr_loss += sums["not_logged"]
            self.trainer._globalstep_last_logged = sums["last_logged"]


def _write_model_card(
    args: TrainingArguments | AccelerateArguments, model: PreTrainedModel, dataset: str | None, **kwargs: Any
) -> None:
    write_model_card(
        args.output_dir,
        name=args.hub_model_id,
        command=args.command,
        recipe=args.recipe,
        datasets=[dataset] if dataset else [],
        base_model=model.config._name_or_path or None,
        **{name: kwargs[name] for name in ("license", "language", "tags") if kwargs.get(name)},
    )


def write_results(output_dir: str, results: dict[str, float], log_history: list[dict[str, float]] | None) -> None:
    """Writes `all_results.json` and the loss curve, and logs the figures.

    Args:
        output_dir: The folder of the run.
        results: The figures.
        log_history: That of a `TrainerState`; None without training. The figures and the curve of a training that are
            in the folder then stay.
    """
    file = Path(output_dir, RESULTS_NAME)
    if log_history is None:
        earlier = {}
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is broken
            earlier = dict(json.loads(file.read_text(encoding="utf-8")))
        kept = {"epoch": earlier["epoch"]} if "epoch" in earlier else {}  # of the training; an evaluation has none
        write_json(file, earlier | results | kept)
    else:
        write_json(file, results)
        plot_loss_curve(log_history, Path(output_dir, LOSS_CURVE_NAME))
    for name, value in sorted(results.items()):
        logger.info("  %s = %s", name, f"{value:.4f}" if isinstance(value, float) else value)


# ---------------------------------------------------------------------------------------------------------------------
# Accelerate
# ---------------------------------------------------------------------------------------------------------------------


class AccelerateRun:
    """The training loop of the Accelerate scripts: plain steps, with exact resume and safe checkpoints.

    Args:
        args: The training arguments.
        model: The model; `run.model` is the prepared one.
        tokenizer: Saved with the model.
        checkpoint: The checkpoint to resume from, if any.
    """

    def __init__(
        self,
        args: AccelerateArguments,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        checkpoint: str | None = None,
    ):
        self.args, self.tokenizer, self.checkpoint = args, tokenizer, checkpoint
        self.accelerator = args.accelerator()
        decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
        parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for name, p in parameters if name in decayed], "weight_decay": args.weight_decay},
            {"params": [p for name, p in parameters if name not in decayed], "weight_decay": 0.0},
        ]
        betas = (args.adam_beta1, args.adam_beta2)
        optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        # Weights go through save_pretrained: each checkpoint is then a model folder, with config, code and tokenizer.
        self.accelerator.register_save_state_pre_hook(self._save_weights)
        self.accelerator.register_load_state_pre_hook(self._load_weights)
        # What a checkpoint keeps beside weights, optimizer and schedule; the names are those of `TrainerState`.
        self.state: dict[str, Any] = {
            "global_step": 0,
            "epoch": 0.0,
            "loss_sum": 0.0,
            "not_logged": 0.0,
            "log_history": [],
        }

    def _save_weights(self, models: list[nn.Module], weights: list[dict], output_dir: str) -> None:
        self._save_pretrained(output_dir)
        weights.clear()

    def _load_weights(self, models: list[nn.Module], input_dir: str) -> None:
        model = self.accelerator.unwrap_model(models.pop())
        model.load_state_dict(type(model).from_pretrained(input_dir).state_dict())

    def _save_pretrained(self, output_dir: str | os.PathLike) -> None:
        self.accelerator.unwrap_model(self.model).save_pretrained(
            output_dir,
            state_dict=self.accelerator.get_state_dict(self.model),
            is_main_process=self.accelerator.is_main_process,
        )
        if self.accelerator.is_main_process:
            self.tokenizer.save_pretrained(output_dir)

    def train(
        self,
        train_dataset: Any,
        collator: Callable,
        evaluate: Callable[[], dict[str, float]] | None = None,
    ) -> dict[str, float]:
        """Trains, or goes on from the checkpoint.

        Args:
            train_dataset: A `Dataset`, or an endless `IterableDataset` together with `max_steps`.
            collator: Makes batches with `labels`; if it has `set_epoch`, it is told the epoch.
            evaluate: Called between steps as `eval_strategy` says; returns figures to log.

        Returns:
            Figures on the training.
        """
        args, accelerator, state = self.args, self.accelerator, self.state
        if args.overwrite_output_dir and not self.checkpoint:
            remove_checkpoints(args.output_dir)
        streaming = isinstance(train_dataset, torch.utils.data.IterableDataset)
        loader = accelerator.prepare(
            DataLoader(
                train_dataset,
                batch_size=args.per_device_train_batch_size,
                shuffle=not streaming,
                collate_fn=collator,
                num_workers=args.dataloader_num_workers,
            )
        )
        window_size = args.gradient_accumulation_steps
        steps_per_epoch = args.max_steps if streaming else math.ceil(len(loader) / window_size)
        max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
        warmup = int(args.warmup_steps) if args.warmup_steps >= 1 else math.ceil(args.warmup_steps * max_steps)
        scheduler = get_scheduler(args.lr_scheduler_type, self.optimizer, warmup, max_steps)
        accelerator.register_for_checkpointing(scheduler)
        if accelerator.log_with:
            accelerator.init_trackers("runs", config={k: v for k, v in asdict(args).items() if v is not None})
        if self.checkpoint:
            accelerator.load_state(self.checkpoint)
            state.update(json.loads(Path(self.checkpoint, TRAINER_STATE_NAME).read_text(encoding="utf-8")))
            logger.info("Resuming after step %d", state["global_step"])

        progress = self._progress_bar(total=max_steps, initial=state["global_step"], desc="train")
        last_logged = max((entry["step"] for entry in state["log_history"] if "loss" in entry), default=0)
        while state["global_step"] < max_steps:
            epoch, done = divmod(state["global_step"], steps_per_epoch)
            loader.set_epoch(epoch)
            if hasattr(collator, "set_epoch"):
                collator.set_epoch(epoch)
            batches = iter(accelerator.skip_first_batches(loader, done * window_size) if done else loader)
            while state["global_step"] < max_steps and (window := list(islice(batches, window_size))):
                # Dropout depends on the step and nothing before it, so a resumed run sees the same.
                transformers.set_seed(derived_seed(args.seed, state["global_step"], accelerator.process_index))
                loss, grad_norm = self._step(window)
                learning_rate = scheduler.get_last_lr()[0]
                scheduler.step()
                state["global_step"] += 1
                state["epoch"] = state["global_step"] / steps_per_epoch
                state["loss_sum"] += loss
                state["not_logged"] += loss
                progress.update()
                ends = state["global_step"] == max_steps
                epoch_ends = ends or state["global_step"] % steps_per_epoch == 0
                if state["global_step"] % args.logging_steps == 0:
                    mean = state["not_logged"] / (state["global_step"] - last_logged)
                    last_logged, state["not_logged"] = state["global_step"], 0.0
                    self.log({"loss": mean, "learning_rate": learning_rate, "grad_norm": grad_norm})
                    progress.set_postfix(loss=f"{mean:.3f}")
                if evaluate and self._due(args.eval_strategy, args.eval_steps or args.logging_steps, epoch_ends):
                    self.log(evaluate())
                if self._due(args.save_strategy, args.save_steps, epoch_ends) or (ends and args.save_strategy != "no"):
                    self._save_checkpoint()
        progress.close()
        return {"train_loss": state["loss_sum"] / max(state["global_step"], 1), "epoch": state["epoch"]}

    def _step(self, window: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
        """One optimizer step over the batches of a window; returns loss and gradient norm."""
        accelerator, args = self.accelerator, self.args
        self.model.train()
        num_labels = accelerator.reduce(sum(batch["labels"].ne(-100).sum() for batch in window), "sum")
        total = torch.zeros((), device=accelerator.device)
        for index, batch in enumerate(window):
            last = index == len(window) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                labels = batch.pop("labels")
                loss = label_loss(self.model(**batch), labels, num_labels)
                accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over processes
                total += loss.detach()
        grad_norm = math.nan
        if args.max_grad_norm > 0:
            grad_norm = float(accelerator.clip_grad_norm_(self.model.parameters(), args.max_grad_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(accelerator.reduce(total, "sum")), grad_norm

    def _progress_bar(self, *args: Any, **kwargs: Any) -> tqdm:
        return tqdm(*args, disable=self.args.disable_tqdm or not self.accelerator.is_main_process, **kwargs)

    def _due(self, strategy: str, steps: int, epoch_ends: bool) -> bool:
        return epoch_ends if strategy == "epoch" else strategy == "steps" and self.state["global_step"] % steps == 0

    def log(self, figures: dict[str, float]) -> None:
        """Adds figures to the log history and to the trackers.

        Args:
            figures: The figures by name.
        """
        step = self.state["global_step"]
        self.state["log_history"].append({**figures, "epoch": self.state["epoch"], "step": step})
        self.accelerator.log(figures, step=step)

    def _save_checkpoint(self) -> None:
        output_dir = Path(self.args.output_dir)
        with atomic_directory(output_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state['global_step']}") as temporary:
            self.accelerator.save_state(str(temporary))
            if self.accelerator.is_main_process:
                write_json(temporary / TRAINER_STATE_NAME, self.state)
        if self.accelerator.is_main_process:
            rotate_checkpoints(str(output_dir), self.args.save_total_limit)

    def evaluation_loader(self, dataset: Any, collator: Callable) -> DataLoader:
        """A prepared loader for evaluation.

        Args:
            dataset: The data.
            collator: Makes batches.

        Returns:
            The loader.
        """
        batch_size = self.args.per_device_eval_batch_size
        return self.accelerator.prepare(DataLoader(dataset, batch_size=batch_size, collate_fn=collator))

    @torch.no_grad()
    def evaluate(
        self, loader: DataLoader, keep_logits: bool = False
    ) -> tuple[float, torch.Tensor | None, torch.Tensor | None]:
        """Runs the model over a dataset.

        Args:
            loader: From `evaluation_loader`.
            keep_logits: Whether to return logits and labels, too.

        Returns:
            Mean loss over all labels, logits and labels; the labels are None if the data have none.
        """
        accelerator = self.accelerator
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        logits, references = [], []
        for batch in self._progress_bar(loader, desc="evaluate", leave=False):
            labels = batch.pop("labels", None)
            outputs = self.model(**batch)
            if labels is not None:
                count = labels.ne(-100).sum()
                sums += torch.stack([label_loss(outputs, labels, 1).double(), count.double()])
            if keep_logits:
                logits.append(accelerator.gather_for_metrics(outputs["logits"]).float().cpu())
                if labels is not None:
                    references.append(accelerator.gather_for_metrics(labels).cpu())
        loss_sum, count = accelerator.reduce(sums, "sum").tolist()
        return (
            loss_sum / count if count else math.nan,
            torch.cat(logits) if logits else None,
            torch.cat(references) if references else None,
        )

    def finish(self, results: dict[str, float], dataset: str | None = None) -> dict[str, float]:
        """Saves the final model, the figures and the model card, and uploads them if asked to.

        Args:
            results: The figures for `all_results.json`.
            dataset: What the model was trained on.

        Returns:
            `results`.
        """
        args = self.args
        if args.do_train:
            with atomic_directory(args.output_dir, merge=True) as temporary:
                self._save_pretrained(temporary)
        if self.accelerator.is_main_process:
            if args.do_train:
                write_json(Path(args.output_dir, TRAINER_STATE_NAME), self.state)
            write_results(args.output_dir, results, self.state["log_history"] if args.do_train else None)
            if args.do_train:
                _write_model_card(args, self.accelerator.unwrap_model(self.model), dataset)
            if args.push_to_hub:
                api = HfApi(token=args.hub_token)
                repo_id = api.create_repo(args.hub_model_id or Path(args.output_dir).name, exist_ok=True).repo_id
                ignored = [f"{PREFIX_CHECKPOINT_DIR}-*", ".tmp-*"]
                api.upload_folder(repo_id=repo_id, folder_path=args.output_dir, ignore_patterns=ignored)
        self.accelerator.end_training()
        return results
