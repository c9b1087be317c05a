"""What the commands share that make one checkpoint of another: `python -m linformer_hf.NAME SOURCE OUTPUT`."""

import logging
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

from .model_card import Result, write_model_card


logger = logging.getLogger(__name__)


@dataclass
class OutputArguments:
    """How the result is written."""

    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace what is in OUTPUT."})


def parse_arguments(
    *dataclass_types: Any, name: str, description: str, source_help: str, argv: list[str] | None
) -> tuple[Any, ...]:
    """Reads a command line, lets the package's messages be seen, and refuses an OUTPUT that would lose something.

    Args:
        *dataclass_types: The options.
        name: The module's.
        description: What it does.
        source_help: What SOURCE may be.
        argv: The command line's arguments if None.

    Returns:
        An object of each type, and one with `source`, `output` and `command`, the whole command line.

    Raises:
        ValueError: If OUTPUT is in use, or holds SOURCE.
    """
    parser = HfArgumentParser(
        (*dataclass_types, OutputArguments),  # type: ignore[arg-type]  # a name of theirs for any dataclass
        prog=f"python -m {__package__}.{name}",
        description=description,
    )
    parser.add_argument("source", metavar="SOURCE", help=source_help)
    parser.add_argument("output", metavar="OUTPUT", help="Folder to write.")
    *options, output, paths = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    logging.basicConfig(format="%(message)s")
    for logger_name in ("__main__", __package__):  # as a script, a module is `__main__`
        logging.getLogger(logger_name).setLevel(logging.INFO)
    _check_output(paths.source, paths.output, output.overwrite_output_dir)
    arguments = sys.argv[1:] if argv is None else argv
    paths.command = shlex.join(["python", "-m", f"{__package__}.{name}", *arguments])
    return *options, paths


def _check_output(source: str, output: str, overwrite: bool) -> None:
    """Refuses a folder that holds something, unless it may be replaced and the source is not in it."""
    folder = Path(output)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not overwrite):
        raise ValueError(f"{output} is in use: choose another folder, or replace it with --overwrite_output_dir")
    if Path(source).exists() and Path(source).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{output} holds the source, {source}, and would be replaced: choose another folder")


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Loads a tokenizer.

    Args:
        source: Folder or Hub name.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If there is none.
    """
    message = f"{source} has no tokenizer: add its files, or do the same in Python, which needs none"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except ValueError as error:
        raise ValueError(message) from error
    # where there are no files, Transformers may make a tokenizer that knows nothing but special tokens
    if not tokenizer.get_vocab().keys() - {str(token) for token in tokenizer.added_tokens_decoder.values()}:
        raise ValueError(message)
    return tokenizer


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    paths: Any,
    figures: dict[str, float] | None = None,
) -> None:
    """Writes a checkpoint with its model card, completely or not at all.

    Args:
        model: The model.
        tokenizer: Its tokenizer, which learns how long the longest input is.
        paths: From `parse_arguments`.
        figures: What the command measured, for the card.
    """
    from .training import atomic_directory  # not above: it needs the packages of `linformer_hf[examples]`

    longest: Any = model.config.max_position_embeddings
    with atomic_directory(paths.output) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.model_max_length = longest
            tokenizer.save_pretrained(temporary)
        results = [Result(name, value, "as above") for name, value in (figures or {}).items()]
        write_model_card(temporary, command=paths.command, base_model=paths.source, results=results)
    logger.info("saved in %s; the longest input has %d tokens", paths.output, longest)


__all__ = ["OutputArguments", "load_tokenizer", "parse_arguments", "save"]
