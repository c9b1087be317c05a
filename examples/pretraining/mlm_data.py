"""Arguments, text, tokenizer, model and masking of the masked-LM scripts.

Documents are packed to full length: the tokens of all documents in order, a separator after each, are cut into
pieces, and each piece goes between the tokenizer's first and last special token (`<s> ... </s>`). No token is lost but
those of the last, incomplete piece: `pack` runs over the whole split in one process and carries what is left of one
batch of documents to the next. The batches of `datasets.map` and the preprocessing workers only tokenize.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
from accelerate import PartialState
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaTokenizer,
)

from linformer_hf import training
from linformer_hf.training import logger


SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # in RoBERTa's order: ids 0 to 4
EVALUATION_EPOCH = -1  # one fixed set of masks, so that validation losses can be compared


@dataclass
class ModelArguments(training.ModelArguments):
    """Which model and tokenizer to start from."""

    model_type: str = field(
        default="linformer",
        metadata={"help": "Family of a new model, if there is no --model_name_or_path: linformer, roberta, bert, ..."},
    )
    config_name: str | None = field(
        default=None, metadata={"help": "Folder or Hub name of the config for a new model, in place of --model_type."}
    )
    train_tokenizer: bool = field(
        default=False,
        metadata={"help": "Train a byte-level BPE tokenizer, with RoBERTa's special tokens, on the text."},
    )
    vocab_size: int = field(default=50265, metadata={"help": "Vocabulary size of --train_tokenizer."})


@dataclass
class DataArguments:
    """Which text to train on, and how to cut and mask it."""

    dataset_name: str | None = field(default=None, metadata={"help": "Folder or Hub name of a dataset."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(default=None, metadata={"help": "Training text: txt, csv, tsv, json or jsonl."})
    validation_file: str | None = field(default=None, metadata={"help": "Validation text, of the same kinds."})
    text_column_name: str | None = field(
        default=None, metadata={"help": "Column with the text; `text`, or else the first with strings."}
    )
    sample_by: Literal["line", "paragraph", "document"] = field(
        default="line", metadata={"help": "What a document is in a txt file: a line, a paragraph or the whole file."}
    )
    validation_split_percentage: float = field(
        default=5, metadata={"help": "Share of the documents held out where there is no validation data."}
    )
    max_seq_length: int | None = field(
        default=None, metadata={"help": "Tokens per block; the longest input of the model, or 512 for a new one."}
    )
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens to predict."})
    streaming: bool = field(default=False, metadata={"help": "Read and tokenize on the fly; needs --max_steps."})
    shuffle_buffer_size: int = field(default=1000, metadata={"help": "Blocks to shuffle among when streaming."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes for tokenizing."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only that many training blocks."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use only that many validation blocks."})

    def __post_init__(self) -> None:
        training.check_at_least(self, 3, "max_seq_length")  # two special tokens and one of the text
        if not 0 < self.mlm_probability <= 1:
            raise ValueError(f"--mlm_probability is {self.mlm_probability}, but must be above 0 and at most 1")


@dataclass
class MlmSetup:
    """What both scripts train with."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train_dataset: Any
    eval_dataset: Any
    collator: "MaskingCollator"
    eval_collator: "MaskingCollator"
    card: dict[str, Any]


def prepare(model_args: ModelArguments, data_args: DataArguments, args: Any, checkpoint: str | None) -> MlmSetup:
    """Loads everything that a masked-LM script needs; every mistake in the arguments shows here, before training.

    Args:
        model_args: The model arguments.
        data_args: The data arguments.
        args: The training arguments.
        checkpoint: The checkpoint to resume from, whose tokenizer is used then.

    Returns:
        Model, tokenizer, data and collators.
    """
    if data_args.streaming and args.do_train and args.max_steps <= 0:
        raise ValueError("--streaming does not know the length of an epoch: pass --max_steps")
    corpus = load_corpus(data_args, args, model_args.cache_dir)
    tokenizer = load_tokenizer(model_args, corpus, checkpoint)
    model = load_model(model_args, tokenizer, data_args.max_seq_length)
    limit = training.longest_input(model)
    max_seq_length = data_args.max_seq_length or limit or 512
    if limit and max_seq_length > limit:
        raise ValueError(
            f"--max_seq_length {max_seq_length} is more than the {limit} tokens that the model has positions for: "
            f"pass at most {limit}, or train a new model"
        )
    tokenizer.model_max_length = max_seq_length
    with PartialState().main_process_first():
        blocks = {
            split: pack_corpus(documents, tokenizer, max_seq_length, split, data_args)
            for split, documents in corpus.items()
        }
    if data_args.streaming and "train" in blocks:
        blocks["train"] = blocks["train"].shuffle(seed=args.seed, buffer_size=data_args.shuffle_buffer_size)
    for split, count in (("train", data_args.max_train_samples), ("validation", data_args.max_eval_samples)):
        if count and split in blocks:
            blocks[split] = blocks[split].take(count)
    masking = partial(MaskingCollator, tokenizer, mlm_probability=data_args.mlm_probability, masking_seed=args.seed)
    eval_collator = masking()
    eval_collator.set_epoch(EVALUATION_EPOCH)
    return MlmSetup(
        model,
        tokenizer,
        blocks.get("train"),
        blocks.get("validation"),
        masking(),
        eval_collator,
        {"dataset": data_args.dataset_name or data_args.train_file},
    )


def load_corpus(data_args: DataArguments, args: Any, cache_dir: str | None) -> dict[str, Any]:
    """Loads the documents.

    Args:
        data_args: The data arguments.
        args: The training arguments; they say which splits are needed.
        cache_dir: Where prepared data are kept.

    Returns:
        Data with one column `text`, under `train` and `validation`, as far as they are needed.
    """
    if data_args.dataset_name:
        data = datasets.load_dataset(
            data_args.dataset_name,
            data_args.dataset_config_name,
            cache_dir=cache_dir,
            streaming=data_args.streaming,
        )
        corpus = {split: data[split] for split in ("train", "validation") if split in data}
    else:
        corpus = training.load_data_files(
            cache_dir,
            data_args.streaming,
            train=data_args.train_file,
            validation=data_args.validation_file,
            sample_by=data_args.sample_by,
        )
    if not corpus:
        raise ValueError("No text: pass --dataset_name or --train_file")
    corpus = {split: text_column(documents, data_args.text_column_name) for split, documents in corpus.items()}
    if "validation" not in corpus and args.do_eval:
        if not 0 < data_args.validation_split_percentage <= 50:
            raise ValueError(
                f"--validation_split_percentage {data_args.validation_split_percentage} is not between 0 and 50"
            )
        # Every so many-th document, so that a stream is split in the same way as a file.
        period = round(100 / data_args.validation_split_percentage)
        documents = corpus["train"]
        corpus = {
            "train": documents.filter(lambda _, index: index % period != 0, with_indices=True),
            "validation": documents.filter(lambda _, index: index % period == 0, with_indices=True),
        }
    if "train" not in corpus and args.do_train:
        raise ValueError("No text to train on: the dataset has no split `train`, or --train_file is missing")
    needed = {"train": args.do_train, "validation": args.do_eval}
    return {split: documents for split, documents in corpus.items() if needed[split]}


def text_column(documents: Any, name: str | None) -> Any:
    """Keeps the column with the text, under the name `text`.

    Args:
        documents: The data.
        name: The column's name, or None to look for it.

    Returns:
        The data with one column.
    """
    row = next(iter(documents), None)
    if row is None:
        raise ValueError("There is no document in the data: at least one is needed")
    if name is None:
        strings = [column for column, value in row.items() if isinstance(value, str)]
        name = "text" if "text" in strings else next(iter(strings), None)
    if name not in row:
        raise ValueError(f"There is no text column {name or ''} among {', '.join(row)}: pass --text_column_name")
    documents = documents.select_columns([name])
    return documents if name == "text" else documents.rename_column(name, "text")


def load_tokenizer(
    model_args: ModelArguments, corpus: dict[str, Any], checkpoint: str | None
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer, or trains one on the training documents.

    Args:
        model_args: The model arguments.
        corpus: From `load_corpus`.
        checkpoint: A checkpoint to resume from, whose tokenizer is used.

    Returns:
        The tokenizer.
    """
    name = checkpoint or model_args.tokenizer_name or model_args.model_name_or_path
    if name and not (model_args.train_tokenizer and not checkpoint):
        return AutoTokenizer.from_pretrained(name, **({} if checkpoint else model_args.hub_options()))
    if not model_args.train_tokenizer:
        raise ValueError("A new model needs a tokenizer: pass --tokenizer_name, or --train_tokenizer to train one")
    smallest = 256 + len(SPECIAL_TOKENS)
    if model_args.vocab_size < smallest:
        raise ValueError(f"--vocab_size {model_args.vocab_size} is below {smallest}: 256 bytes and the special tokens")
    documents = corpus.get("train", corpus.get("validation"))
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        (text for batch in documents.iter(batch_size=1000) for text in batch["text"] if text),
        vocab_size=model_args.vocab_size,
        special_tokens=SPECIAL_TOKENS,
    )
    merges = json.loads(bpe.to_str())["model"]["merges"]
    tokenizer = RobertaTokenizer(vocab=bpe.get_vocab(), merges=[tuple(pair) for pair in merges])
    logger.info("Trained a tokenizer with %d tokens", len(tokenizer))
    return tokenizer


def load_model(
    model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase, max_seq_length: int | None
) -> PreTrainedModel:
    """Loads the model, or makes a new one that fits the tokenizer and the sequence length.

    Args:
        model_args: The model arguments.
        tokenizer: The tokenizer.
        max_seq_length: Tokens per block; 512 for a new model if None.

    Returns:
        The model.
    """
    overrides = training.parse_overrides(model_args.config_overrides)
    options = model_args.hub_options()
    name = model_args.model_name_or_path or model_args.config_name
    if name:
        config = AutoConfig.from_pretrained(name, **options)
        training.check_overrides(config, overrides, trained_weights=bool(model_args.model_name_or_path))
        config = AutoConfig.from_pretrained(name, **options, **overrides)
    else:
        config = training.config_from_scratch(model_args.model_type, tokenizer, max_seq_length or 512, overrides)
    if model_args.model_name_or_path:
        model = AutoModelForMaskedLM.from_pretrained(
            name, config=config, attn_implementation=model_args.attn_implementation, **options
        )
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer))
    else:
        model = AutoModelForMaskedLM.from_config(
            config,
            attn_implementation=model_args.attn_implementation,
            trust_remote_code=model_args.trust_remote_code,
        )
    logger.info("%s with %.1f M parameters", type(model).__name__, model.num_parameters() / 1e6)
    return model


def pack_corpus(
    documents: Any, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, split: str, data_args: DataArguments
) -> Any:
    """Tokenizes documents and packs them to blocks of full length.

    Args:
        documents: Data with a column `text`.
        tokenizer: The tokenizer.
        max_seq_length: Tokens per block, special tokens included.
        split: `train` or `validation`.
        data_args: The data arguments.

    Returns:
        Data with a column `input_ids`; an endless stream for training when streaming.
    """
    tokenize = partial(_tokenize, tokenizer=tokenizer)
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    packing = {
        "first": tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id,
        "separator": tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id,
        "block_size": max_seq_length,
    }
    mapping = {"function": tokenize, "batched": True, "remove_columns": ["text"]}
    if data_args.streaming:
        packing["documents"] = (documents.repeat(None) if split == "train" else documents).map(**mapping)
    else:
        packing["documents"] = documents.map(
            **mapping,
            num_proc=data_args.preprocessing_num_workers,
            load_from_cache_file=not data_args.overwrite_cache,
            desc=f"Tokenize {split} documents",
        )
    if next(pack(**packing), None) is None:
        raise ValueError(
            f"The {split} documents do not fill one block of --max_seq_length {max_seq_length} tokens: "
            "lower it or add text"
        )
    if data_args.streaming:
        return datasets.IterableDataset.from_generator(pack, features=features, gen_kwargs=packing)
    cache_dir = str(Path(documents.cache_files[0]["filename"]).parent) if documents.cache_files else None
    blocks = datasets.Dataset.from_generator(pack, features=features, gen_kwargs=packing, cache_dir=cache_dir)
    blocks.info.builder_name = "text"  # "generator" would be taken for a dataset's name in the model card
    logger.info("%d %s documents in %d blocks of %d tokens", len(documents), split, len(blocks), max_seq_length)
    return blocks


def _tokenize(batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    texts = [text or "" for text in batch["text"]]
    # Not verbose: documents longer than the model's limit are cut into blocks, so no need to warn of them.
    return {"input_ids": tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]}


def pack(documents: Any, first: int | None, separator: int | None, block_size: int) -> Iterator[dict[str, list[int]]]:
    """Packs tokenized documents to blocks of full length, see the top of this file.

    Args:
        documents: Data with a column `input_ids`, without special tokens.
        first: Token at the start of each block, if any.
        separator: Token after each document and at the end of each block, if any.
        block_size: Tokens per block.

    Yields:
        The blocks.
    """
    start = [] if first is None else [first]
    end = [] if separator is None else [separator]
    piece_size = block_size - len(start) - len(end)
    rest: list[int] = []
    for batch in documents.iter(batch_size=1000):
        for document in batch["input_ids"]:
            if document:
                rest += [*document, *end]
        pieces = len(rest) // piece_size
        for index in range(pieces):
            yield {"input_ids": [*start, *rest[index * piece_size : (index + 1) * piece_size], *end]}
        rest = rest[pieces * piece_size :]


@dataclass
class MaskingCollator(DataCollatorForLanguageModeling):
    """Dynamic masking that is the same again for the same seed, epoch and block.

    Each row is masked with random numbers of its own, which depend on `masking_seed`, the epoch and the tokens of the
    row. So masks change from epoch to epoch, but neither prefetching nor resuming, neither the batch size nor the
    number of processes changes them.
    """

    masking_seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        # In shared memory, so that data-loading processes that outlive an epoch see the next one.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.special_ids = torch.tensor(self.tokenizer.all_special_ids)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the masks of an epoch.

        Args:
            epoch: Its number.
        """
        self.epoch.fill_(epoch)

    def torch_mask_tokens(self, inputs: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks each row on its own, as in the parent class.

        Args:
            inputs: (b, n), token ids.

        Returns:
            Masked token ids and labels.
        """
        self.generator = torch.Generator()
        special = torch.isin(inputs, self.special_ids)
        rows = []
        for row, special_row in zip(inputs.split(1), special.split(1), strict=True):
            seed = training.derived_seed(self.masking_seed, int(self.epoch), data=row.numpy().tobytes())
            self.generator.manual_seed(seed)
            rows.append(super().torch_mask_tokens(row, special_tokens_mask=special_row))
        masked, labels = zip(*rows, strict=True)
        return torch.cat(masked), torch.cat(labels)
