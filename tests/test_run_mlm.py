import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from hubserver import card_errors
from huggingface_hub import ModelCard
from transformers import AutoModelForMaskedLM, AutoTokenizer
from transformers.integrations import is_tensorboard_available

from linformer_hf import training


EXAMPLES = Path(__file__).parents[1] / "examples" / "pretraining"
sys.path.insert(0, str(EXAMPLES))

import mlm_data  # noqa: E402
import run_mlm  # noqa: E402
import run_mlm_no_trainer  # noqa: E402


SCRIPTS = {"trainer": run_mlm.main, "accelerate": run_mlm_no_trainer.main}
SIZES = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
NO_DROPOUT = ",hidden_dropout_prob=0,attention_probs_dropout_prob=0"


@pytest.fixture(autouse=True)
def no_cache_from_earlier_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A file with 120 documents, some of them empty, and a tokenizer trained on it."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=3)) for _ in range(100)]
    folder = tmp_path_factory.mktemp("corpus")
    lines = [" ".join(generator.choices(words, k=generator.choice([0, 3, 10, 30]))) for _ in range(120)]
    lines[0] = "first document"  # a text file may not begin with nothing
    file = folder / "corpus.txt"
    file.write_text("\n".join(lines) + "\n")
    arguments = mlm_data.ModelArguments(train_tokenizer=True, vocab_size=300)
    tokenizer = mlm_data.load_tokenizer(arguments, {"train": datasets.Dataset.from_dict({"text": lines})}, None)
    tokenizer.save_pretrained(folder / "tokenizer")
    return file


@pytest.fixture(scope="module")
def flags(corpus):
    """Flags of a run of 2 epochs with 26 steps, made with `flags(output_dir, overrides, *more)`."""

    def make(output_dir, overrides="", *more):
        return [
            *("--train_file", str(corpus), "--tokenizer_name", str(corpus.parent / "tokenizer")),
            *("--cache_dir", str(corpus.parent / "cache"), "--config_overrides", SIZES + overrides),
            *("--max_seq_length", "32", "--do_train", "--do_eval", "--learning_rate", "1e-3"),
            *("--num_train_epochs", "2", "--max_train_samples", "100", "--per_device_eval_batch_size", "64"),
            *("--logging_steps", "5", "--save_steps", "5", "--report_to", "none", "--output_dir", str(output_dir)),
            *more,
        ]

    return make


def texts(file):
    return [line for line in file.read_text().splitlines() if line]


# --- The whole run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("model_type", ["linformer", "roberta"])
def test_a_run_leaves_a_model_figures_and_a_curve(tmp_path, corpus, script, model_type):
    output = tmp_path / "out"
    argv = ["--train_file", str(corpus), "--train_tokenizer", "--vocab_size", "280", "--max_seq_length", "48"]
    argv += ["--do_train", "--do_eval", "--max_steps", "12", "--logging_steps", "2", "--learning_rate", "3e-3"]
    argv += [
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "6",
        "--config_overrides",
        SIZES,
        "--cache_dir",
        str(tmp_path),
    ]
    results = SCRIPTS[script]([*argv, "--model_type", model_type, "--output_dir", str(output)])
    assert json.loads((output / "all_results.json").read_text()) == results
    assert results["perplexity"] == pytest.approx(training.perplexity(results["eval_loss"]))
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert [entry["step"] for entry in history if "eval_loss" in entry][:2] == [6, 12]
    assert (output / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert any(output.rglob("events.out.tfevents*")) == is_tensorboard_available()

    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.convert_tokens_to_ids(mlm_data.SPECIAL_TOKENS) == [0, 1, 2, 3, 4]
    assert (len(tokenizer), tokenizer.model_max_length) == (280, 48)
    model = AutoModelForMaskedLM.from_pretrained(output)
    assert model.config.model_type == model_type
    assert (model.config.vocab_size, training.longest_input(model)) == (280, 48)
    inputs = tokenizer("abc <mask>" * 40, truncation=True, return_tensors="pt")
    assert inputs["input_ids"].shape == (1, 48)
    assert model(**inputs).logits.isfinite().all()

    card = ModelCard.load(output / "README.md")
    assert card_errors(card.content) == []
    assert (card.data.pipeline_tag, card.data.base_model) == ("fill-mask", None)
    measured = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert measured == pytest.approx({name: results[f"eval_{name}" if name == "loss" else name] for name in measured})
    assert set(measured) == {"loss", "perplexity"}
    name = {"trainer": "run_mlm", "accelerate": "run_mlm_no_trainer"}[script]
    assert f"python {name}.py --train_file" in card.text
    assert "--max_steps 12 --logging_steps 2 --learning_rate 3e-3 --eval_strategy steps" in card.text

    # Once more from the saved folder and in it: the same figure, and those of the training stay.
    argv = [
        "--train_file",
        str(corpus),
        "--do_eval",
        "--model_name_or_path",
        str(output),
        "--cache_dir",
        str(tmp_path),
    ]
    again = SCRIPTS[script]([*argv, "--output_dir", str(output), "--report_to", "none"])
    assert again["eval_loss"] == pytest.approx(results["eval_loss"], abs=1e-6)
    figures = json.loads((output / "all_results.json").read_text())
    for name in ("train_loss", "epoch"):
        assert figures[name] == results[name]
    if model_type == "linformer":
        with pytest.raises(ValueError, match="projected_length=9: the trained projections"):
            SCRIPTS[script]([*argv, "--output_dir", str(output), "--config_overrides", "projected_length=9"])


def test_a_checkpoint_of_either_script_is_a_model_folder(tmp_path, flags):
    for script, main in SCRIPTS.items():
        main(flags(tmp_path / script, "", "--max_steps", "5"))
        checkpoint = tmp_path / script / "checkpoint-5"
        final = AutoModelForMaskedLM.from_pretrained(tmp_path / script)
        for name, weight in AutoModelForMaskedLM.from_pretrained(checkpoint).state_dict().items():
            assert torch.equal(weight, final.state_dict()[name]), name
        assert AutoTokenizer.from_pretrained(checkpoint).model_max_length == 32


def test_both_scripts_train_alike(tmp_path, flags):
    results = [
        main(flags(tmp_path / script, NO_DROPOUT, "--eval_strategy", "epoch")) for script, main in SCRIPTS.items()
    ]
    for name in ("train_loss", "eval_loss", "epoch"):
        assert results[0][name] == pytest.approx(results[1][name], abs=1e-5), name


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("model_type", ["linformer", "roberta"])
def test_gradient_accumulation_changes_nothing(tmp_path, flags, script, model_type):
    results = []
    for size, accumulation in ((8, 1), (2, 4)):
        more = ("--per_device_train_batch_size", str(size), "--gradient_accumulation_steps", str(accumulation))
        folder = tmp_path / f"{size}"
        results.append(
            SCRIPTS[script](flags(folder, NO_DROPOUT, "--model_type", model_type, "--max_steps", "6", *more))
        )
    for name in ("train_loss", "eval_loss"):
        assert results[0][name] == pytest.approx(results[1][name], abs=1e-5), name


@pytest.mark.parametrize("script", SCRIPTS)
def test_bfloat16(tmp_path, flags, script):
    whole = SCRIPTS[script](flags(tmp_path / "float32", NO_DROPOUT, "--max_steps", "4"))
    half = SCRIPTS[script](flags(tmp_path / "bfloat16", NO_DROPOUT, "--max_steps", "4", "--bf16"))
    assert half["eval_loss"] != whole["eval_loss"]
    assert half["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-2)


def test_recipes_are_complete_and_serve_both_scripts(tmp_path, corpus):
    for recipe in sorted((EXAMPLES / "recipes").glob("*.json")):
        for arguments in (training.TrainingArguments, training.AccelerateArguments):
            parsed = training.parse_arguments(
                mlm_data.ModelArguments, mlm_data.DataArguments, arguments, argv=[str(recipe), "--bf16", "false"]
            )
            assert parsed[2].do_train
            assert parsed[2].do_eval
    recipe = str(EXAMPLES / "recipes" / "tiny.json")
    more = ["--max_steps", "2", "--max_seq_length", "32", "--output_dir", str(tmp_path / "out")]
    for model_type in ("linformer", "roberta"):  # one flag apart
        flags = ["--train_file", str(corpus), "--cache_dir", str(tmp_path), "--model_type", model_type, *more]
        assert run_mlm.main([recipe, *flags, "--overwrite_output_dir"])["eval_loss"] > 0
        assert AutoModelForMaskedLM.from_pretrained(tmp_path / "out").config.model_type == model_type


# --- Resuming --------------------------------------------------------------------------------------------------------


def interrupt_at(monkeypatch, step):
    """Makes the optimizer step after `step` others fail as if the user had pressed Ctrl-C."""
    done = 0
    original = torch.optim.AdamW.step

    def interrupted(self, *args, **kwargs):
        nonlocal done
        done += 1
        if done > step:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("step", [8, 15])  # in the middle of the first and of the second epoch of 7 steps
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, flags, script, step, monkeypatch):
    more = (
        "--gradient_accumulation_steps",
        "2",
        "--eval_strategy",
        "epoch",
        "--logging_steps",
        "2",
        "--num_train_epochs",
        "3",
    )
    expected = SCRIPTS[script](flags(tmp_path / "whole", "", *more))
    killed = flags(tmp_path / "killed", "", *more)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        interrupt_at(patch, step)
        SCRIPTS[script](killed)
    assert (tmp_path / "killed" / f"checkpoint-{step // 5 * 5}").is_dir()
    with pytest.raises(ValueError, match="already holds a run"):
        SCRIPTS[script](killed)
    results = SCRIPTS[script]([*killed, "--resume_from_checkpoint", "true"])
    for name in ("eval_loss", "train_loss", "perplexity"):
        assert results[name] == pytest.approx(expected[name], abs=1e-6), name
    assert log_history(tmp_path / "killed") == pytest.approx(log_history(tmp_path / "whole"), abs=1e-6)


def log_history(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history for name in ("loss", "eval_loss") if name in entry]


@pytest.mark.parametrize("script", SCRIPTS)
def test_streaming_and_its_resume(tmp_path, flags, script):
    more = ("--streaming", "--max_steps", "12", "--max_eval_samples", "4", "--shuffle_buffer_size", "10")
    argv = [*flags(tmp_path / "out", "", *more)]
    argv[argv.index("--max_train_samples") + 1] = "100000"  # more than two passes over the corpus have
    expected = SCRIPTS[script](argv)
    for step in (10, 12):
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{step}")
    results = SCRIPTS[script]([*argv, "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-5")])
    assert results["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["run_mlm", "run_mlm_no_trainer"])
def test_a_run_killed_for_good(tmp_path, flags, script):
    def start(folder, *more):
        argv = [sys.executable, EXAMPLES / f"{script}.py", *flags(folder, "", "--num_train_epochs", "40", *more)]
        return subprocess.Popen(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)

    assert start(tmp_path / "whole").wait() == 0
    process = start(tmp_path / "killed")
    while not (tmp_path / "killed" / "checkpoint-20").is_dir():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert start(tmp_path / "killed", "--resume_from_checkpoint", "true").wait() == 0
    expected, results = (
        json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("whole", "killed")
    )
    assert results["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)


def test_overwrite_deletes_the_old_checkpoints_only_when_training_starts(tmp_path, flags):
    for main in SCRIPTS.values():
        main(flags(tmp_path, "", "--max_steps", "10", "--overwrite_output_dir"))
        with pytest.raises(ValueError, match="does not exist"):
            main(flags(tmp_path, "", "--overwrite_output_dir", "--validation_file", "missing.txt"))
        assert (tmp_path / "checkpoint-10").is_dir()
        main(flags(tmp_path, "", "--max_steps", "5", "--overwrite_output_dir"))
        assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-5"]


# --- Packing and masking ---------------------------------------------------------------------------------------------


def unpack(blocks, tokenizer):
    """The tokens of all blocks in order, without those at both ends of each block."""
    stream = []
    for block in blocks:
        assert (block[0], block[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        stream += block[1:-1]
    return stream


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize("streaming", [False, True])
def test_packing_loses_only_the_last_incomplete_block(corpus, tmp_path, workers, streaming):
    tokenizer = AutoTokenizer.from_pretrained(corpus.parent / "tokenizer")
    documents = texts(corpus) * 20  # more than one batch of datasets.map
    expected = []
    for document in tokenizer(documents, add_special_tokens=False)["input_ids"]:
        expected += [*document, tokenizer.sep_token_id]
    data = datasets.Dataset.from_dict({"text": documents})
    arguments = mlm_data.DataArguments(preprocessing_num_workers=workers, streaming=streaming)
    if streaming:
        data = data.to_iterable_dataset(num_shards=3)
    packed = mlm_data.pack_corpus(data, tokenizer, 24, "validation", arguments)
    blocks = [row["input_ids"] for row in packed]
    stream = unpack(blocks, tokenizer)
    assert all(len(block) == 24 for block in blocks)
    assert stream == expected[: len(stream)]
    assert len(expected) - len(stream) < 22


def test_a_training_stream_begins_again_without_losing_a_token(corpus):
    tokenizer = AutoTokenizer.from_pretrained(corpus.parent / "tokenizer")
    documents = texts(corpus)[:10]
    expected = []
    for document in tokenizer(documents, add_special_tokens=False)["input_ids"]:
        expected += [*document, tokenizer.sep_token_id]
    data = datasets.Dataset.from_dict({"text": documents}).to_iterable_dataset()
    packed = mlm_data.pack_corpus(data, tokenizer, 24, "train", mlm_data.DataArguments(streaming=True))
    stream = unpack([row["input_ids"] for row in packed.take(len(expected) * 3 // 22)], tokenizer)
    assert stream == (expected * 3)[: len(stream)]


def test_documents_longer_than_many_blocks():
    class Batches:
        def iter(self, batch_size):
            yield {"input_ids": [list(range(10, 110)), []]}
            yield {"input_ids": [[7], list(range(200, 203))]}

    blocks = [block["input_ids"] for block in mlm_data.pack(Batches(), 0, 2, 12)]
    stream = [token for block in blocks for token in block[1:-1]]
    assert stream == [*range(10, 110), 2, 7, 2, 200, 201, 202, 2][:100]


@pytest.fixture(scope="module")
def collator(corpus):
    tokenizer = AutoTokenizer.from_pretrained(corpus.parent / "tokenizer")
    return mlm_data.MaskingCollator(tokenizer, masking_seed=1)


def rows(count, length=64):
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": [0, *torch.randint(5, 250, (length,), generator=generator).tolist(), 2]} for _ in range(count)
    ]


def test_masks_depend_on_the_epoch_and_the_block_only(collator):
    examples = rows(8)
    collator.set_epoch(0)
    batch = collator(examples)
    for size in (1, 4):
        torch.manual_seed(size)
        parts = [collator(examples[index : index + size]) for index in range(0, 8, size)]
        for name in ("input_ids", "labels"):
            assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
    collator.set_epoch(1)
    assert not torch.equal(collator(examples)["labels"], batch["labels"])
    collator.set_epoch(0)
    assert torch.equal(collator(examples)["labels"], batch["labels"])


def test_masking_follows_bert(collator):
    examples = rows(200)
    batch = collator(examples)
    original = torch.tensor([example["input_ids"] for example in examples])
    chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][chosen], original[chosen])
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])
    assert not chosen[:, [0, -1]].any()
    assert chosen[:, 1:-1].float().mean() == pytest.approx(0.15, abs=0.01)
    masked = batch["input_ids"][chosen] == collator.tokenizer.mask_token_id
    assert masked.float().mean() == pytest.approx(0.8, abs=0.03)
    assert (batch["input_ids"][chosen] == original[chosen]).float().mean() == pytest.approx(0.1, abs=0.03)


def test_data_loading_processes_that_outlive_an_epoch_see_the_next(collator):
    loader = torch.utils.data.DataLoader(
        rows(8), batch_size=4, collate_fn=collator, num_workers=1, persistent_workers=True
    )
    seen = []
    for epoch in (0, 1):
        collator.set_epoch(epoch)
        seen.append(torch.cat([batch["labels"] for batch in loader]))
    assert not torch.equal(*seen)


# --- Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--train_file", "missing.txt"], "missing.txt does not exist"),
        (["--text_column_name", "body"], "no text column body.*--text_column_name"),
        (["--max_seq_length", "2"], "--max_seq_length is 2, but must be at least 3"),
        (["--mlm_probability", "0"], "--mlm_probability is 0.0, but must be above 0 and at most 1"),
        (["--mlm_probability", "1.5"], "--mlm_probability is 1.5"),
        (["--max_seq_length", "5000"], "do not fill one block of --max_seq_length 5000"),
        (["--model_type", "linfomer"], "linfomer"),
        (["--config_overrides", "hiden_size=8"], "hiden_size"),
        (["--streaming"], "--max_steps"),
        (["--validation_split_percentage", "0"], "--validation_split_percentage 0"),
        (["--train_tokenizer", "--vocab_size", "10"], "--vocab_size 10 is below 261"),
    ],
)
def test_mistakes_show_before_training(tmp_path, flags, script, more, message):
    with pytest.raises(ValueError, match=message):
        SCRIPTS[script](flags(tmp_path / "out", "", *more))
    assert not (tmp_path / "out").exists()


def test_no_text_no_tokenizer_or_too_long_for_the_model(tmp_path, corpus):
    common = ["--do_train", "--output_dir", str(tmp_path / "out"), "--cache_dir", str(tmp_path)]
    with pytest.raises(ValueError, match="--dataset_name or --train_file"):
        run_mlm.main(common)
    common += ["--train_file", str(corpus)]
    with pytest.raises(ValueError, match="--tokenizer_name"):
        run_mlm.main(common)
    config = transformers.RobertaConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=34
    )
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "model")
    common += ["--tokenizer_name", str(corpus.parent / "tokenizer"), "--model_name_or_path", str(tmp_path / "model")]
    with pytest.raises(ValueError, match="--max_seq_length 33 is more than the 32"):
        run_mlm.main([*common, "--max_seq_length", "33"])


def test_a_dataset_by_name_and_another_text_column(tmp_path, corpus, flags):
    folder = tmp_path / "dataset"
    folder.mkdir()
    rows = "".join(json.dumps({"id": str(index), "body": text}) + "\n" for index, text in enumerate(texts(corpus)))
    (folder / "train.jsonl").write_text(rows)
    argv = flags(tmp_path / "out", "", "--max_steps", "2", "--dataset_name", str(folder), "--text_column_name", "body")
    assert run_mlm.main(argv)["eval_loss"] > 0
