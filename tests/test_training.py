import contextlib
import json
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import RobertaConfig, RobertaForMaskedLM, RobertaForSequenceClassification

import linformer_hf
from linformer_hf import training


@dataclass
class Options:
    number: int = 1
    rate: float = 0.5
    name: str | None = None


def test_flags_recipe_and_flags_that_change_it(tmp_path):
    recipe = tmp_path / "recipe.json"
    recipe.write_text('{"number": 7, "name": "seven"}')
    assert training.parse_arguments(Options, argv=["--number", "3"]) == (Options(3),)
    assert training.parse_arguments(Options, argv=[str(recipe)]) == (Options(7, name="seven"),)
    assert training.parse_arguments(Options, argv=[str(recipe), "--number", "8"]) == (Options(8, name="seven"),)


def test_recipe_with_an_unknown_name_or_no_recipe(tmp_path):
    recipe = tmp_path / "recipe.json"
    recipe.write_text('{"numbr": 7}')
    with pytest.raises(ValueError, match="numbr"):
        training.parse_arguments(Options, argv=[str(recipe)])
    with pytest.raises(ValueError, match="no recipe file"):
        training.parse_arguments(Options, argv=[str(tmp_path / "other.json")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "recipe.json is not a JSON file"),
        ("[1]", "recipe.json holds a list, but must hold one JSON object"),
        ('{"save_strategy": "sometimes"}', 'save_strategy to "sometimes", but it must be one of no, steps, epoch'),
        ('{"max_steps": 1.5}', "max_steps to 1.5, but it must be int"),
        ('{"max_steps": true}', "max_steps to true, but it must be int"),
        ('{"learning_rate": null}', "learning_rate to null, but it must be float"),
        ('{"learning_rate": [1]}', r"learning_rate to \[1\], but it must be float"),
        ('{"do_train": "perhaps"}', 'do_train to "perhaps", but it must be true or false'),
        ('{"output_dir": {}}', "output_dir to {}, but it must be str"),
        ('{"gradient_accumulation_steps": 0}', "--gradient_accumulation_steps is 0, but must be at least 1"),
    ],
)
@pytest.mark.parametrize("arguments", [training.TrainingArguments, training.AccelerateArguments])
def test_recipe_values_are_checked_like_flags(tmp_path, arguments, text, message):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(text)
    with pytest.raises(ValueError, match=message):
        training.parse_arguments(arguments, argv=[str(recipe)])


def test_recipe_values_are_converted_like_flags(tmp_path):
    recipe = tmp_path / "recipe.json"
    values = {"max_steps": 16.0, "learning_rate": "1e-3", "do_train": True, "resume_from_checkpoint": True}
    recipe.write_text(json.dumps({**values, "save_total_limit": None, "config_overrides": {"hidden_size": 8}}))
    model_args, args = training.parse_arguments(
        training.ModelArguments, training.AccelerateArguments, argv=[str(recipe)]
    )
    assert (args.max_steps, args.learning_rate, args.do_train) == (16, 1e-3, True)
    assert isinstance(args.max_steps, int)
    assert (args.resume_from_checkpoint, args.save_total_limit) == ("True", None)
    assert model_args.config_overrides == {"hidden_size": 8}
    recipe.write_text('{"report_to": ["none"], "lr_scheduler_kwargs": {"num_cycles": 2}}')
    (args,) = training.parse_arguments(training.TrainingArguments, argv=[str(recipe)])
    assert (args.report_to, args.lr_scheduler_kwargs) == ([], {"num_cycles": 2})


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "logging_steps", "save_steps", "eval_steps"])
def test_steps_are_at_least_one(name):
    with pytest.raises(ValueError, match=f"--{name} is 0, but must be at least 1"):
        training.AccelerateArguments(**{name: 0})


def test_names_of_transformers_no_trainer_scripts():
    (args,) = training.parse_arguments(
        training.AccelerateArguments,
        argv=["--max_train_steps", "5", "--num_warmup_steps", "2", "--checkpointing_steps", "3"],
    )
    assert (args.max_steps, args.warmup_steps, args.save_steps) == (5, 2, 3)


def test_nothing_to_do(tmp_path):
    with pytest.raises(ValueError, match="--do_train"):
        training.start_run(training.AccelerateArguments(output_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (None, {}),
        ({"a": [1]}, {"a": [1]}),
        ("a=1,b=[2,3],c=gelu,d=True,e=1e-5", {"a": 1, "b": [2, 3], "c": "gelu", "d": True, "e": 1e-5}),
    ],
)
def test_config_overrides(text, values):
    assert training.parse_overrides(text) == values


def test_wrong_config_overrides():
    with pytest.raises(ValueError, match="name=value"):
        training.parse_overrides("a")
    with pytest.raises(ValueError, match="hiden_size"):
        training.check_overrides(linformer_hf.LinformerConfig(), {"hiden_size": 4})

    with pytest.raises(ValueError, match="--config_overrides is 5"):
        training.parse_overrides(5)


@pytest.mark.parametrize(
    ("overrides", "fits"),
    [
        ({"projected_length": 8, "projection_type": "linear", "hidden_dropout_prob": 0}, True),
        ({"projected_length": [8, 8]}, True),
        ({"projected_length": 4}, False),
        ({"projected_length": [8, 4]}, False),
        ({"projection_type": "mean_pooling"}, False),
        ({"projection_sharing": "none"}, False),
        ({"max_position_embeddings": 64}, False),
    ],
)
def test_overrides_that_trained_projections_do_not_fit(overrides, fits):
    config = linformer_hf.LinformerConfig(num_hidden_layers=2, max_position_embeddings=32, projected_length=8)
    training.check_overrides(config, overrides, trained_weights=False)
    training.check_overrides(RobertaConfig(max_position_embeddings=9), {"max_position_embeddings": 34})
    message = f"{next(iter(overrides))}=.*trained projections .* another shape.*--config_name"
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match=message):
        training.check_overrides(config, overrides)


def test_pooling_has_no_trained_projections():
    config = linformer_hf.LinformerConfig(projection_type="mean_pooling", projected_length=8)
    training.check_overrides(config, {"projected_length": 4, "projection_type": "max_pooling"})


# --- Files and folders -----------------------------------------------------------------------------------------------


def make_checkpoint(folder, step):
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    RobertaForMaskedLM(tiny_roberta()).save_pretrained(checkpoint)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"step": step}, checkpoint / name)
    training.write_json(checkpoint / "trainer_state.json", {"global_step": step})
    return checkpoint


def tiny_roberta(**options):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return RobertaConfig(vocab_size=50, max_position_embeddings=34, **sizes, **options)


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_newest_checkpoint_is_the_newest_complete_one(tmp_path, name):
    for step in (9, 10):
        make_checkpoint(tmp_path, step)
    assert training.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    file = tmp_path / "checkpoint-10" / name
    file.write_text("{") if name.endswith("json") else cut(file)
    assert training.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
    file.unlink()
    assert training.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")


@pytest.mark.parametrize("script", ["trainer", "accelerate"])
def test_a_checkpoint_without_one_of_its_files_is_passed_over(tmp_path, script, caplog):
    train = train_accelerate if script == "accelerate" else lambda folder: make_trainer(folder).train()
    train(tmp_path)
    for file in sorted((tmp_path / "checkpoint-4").iterdir()):
        caplog.clear()
        hidden = file.rename(tmp_path / "hidden")
        newest = training.prepare_output_dir(tmp_path, resume_from_checkpoint="true")
        hidden.rename(file)
        if file.name in {"training_args.bin", "README.md", "generation_config.json"}:  # nothing is read from them
            assert newest == str(tmp_path / "checkpoint-4")
        else:
            assert newest == str(tmp_path / "checkpoint-3"), file.name
            assert "Passing over" in caplog.text
    for name, text in (("config.json", "{"), ("trainer_state.json", "{}"), ("trainer_state.json", "[]")):
        before = (tmp_path / "checkpoint-4" / name).read_text()
        (tmp_path / "checkpoint-4" / name).write_text(text)
        assert training.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
        (tmp_path / "checkpoint-4" / name).write_text(before)
    assert training.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_checkpoints_without_optimizer_and_in_shards(tmp_path, caplog):
    make_trainer(tmp_path, save_only_model=True).train()
    newest = tmp_path / "checkpoint-4"
    assert training.newest_checkpoint(tmp_path) == str(newest)
    assert "--save_only_model" in caplog.text
    (newest / "model.safetensors").unlink()
    RobertaForMaskedLM(tiny_roberta()).save_pretrained(newest, max_shard_size="5kB")
    shards = sorted(newest.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert training.newest_checkpoint(tmp_path) == str(newest)
    for file in (shards[0], newest / "model.safetensors.index.json"):
        hidden = file.rename(tmp_path / "hidden")
        assert training.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
        hidden.rename(file)


def test_output_folder(tmp_path):
    assert training.prepare_output_dir(tmp_path / "new") is None
    assert training.prepare_output_dir(tmp_path) is None
    (tmp_path / "notes.txt").write_text("not a run")
    assert training.prepare_output_dir(tmp_path) is None
    with pytest.raises(ValueError, match="no complete checkpoint"):
        training.prepare_output_dir(tmp_path, resume_from_checkpoint="true")
    checkpoint = make_checkpoint(tmp_path, 3)
    with pytest.raises(ValueError, match=f"{tmp_path}.*--resume_from_checkpoint.*--overwrite_output_dir"):
        training.prepare_output_dir(tmp_path)
    assert training.prepare_output_dir(tmp_path, overwrite=True) is None
    for resume in (True, "true", "True", str(checkpoint)):
        assert training.prepare_output_dir(tmp_path, resume_from_checkpoint=resume) == str(checkpoint)
    cut(checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match="cannot be loaded"):
        training.prepare_output_dir(tmp_path, resume_from_checkpoint=str(checkpoint))
    assert checkpoint.is_dir()


def test_a_finished_run_is_refused_too(tmp_path):
    training.write_json(tmp_path / "all_results.json", {})
    with pytest.raises(ValueError, match="already holds a run"):
        training.prepare_output_dir(tmp_path)


@pytest.mark.parametrize("arguments", [training.TrainingArguments, training.AccelerateArguments])
def test_a_trained_folder_can_be_evaluated(tmp_path, arguments):
    make_checkpoint(tmp_path, 3)
    assert training.start_run(arguments(output_dir=str(tmp_path), report_to="none", do_eval=True)) is None
    with pytest.raises(ValueError, match="already holds a run"):
        training.start_run(arguments(output_dir=str(tmp_path), report_to="none", do_train=True))


def test_figures_of_an_evaluation_go_beside_those_of_the_training(tmp_path):
    training.write_results(tmp_path, {"train_loss": 1.0, "eval_loss": 2.0, "epoch": 3.0}, [{"step": 1, "loss": 1.0}])
    curve = (tmp_path / "loss_curve.png").read_bytes()
    training.write_results(tmp_path, {"eval_loss": 4.0, "epoch": 0}, None)
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert results == {"train_loss": 1.0, "eval_loss": 4.0, "epoch": 3.0}
    assert (tmp_path / "loss_curve.png").read_bytes() == curve
    (tmp_path / "all_results.json").write_text("{")
    training.write_results(tmp_path, {"eval_loss": 4.0}, None)
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"eval_loss": 4.0}


def test_remove_checkpoints_keeps_the_rest(tmp_path):
    make_checkpoint(tmp_path, 3)
    (tmp_path / "checkpoint-notes.txt").write_text("mine")
    training.remove_checkpoints(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint-notes.txt"]


@pytest.mark.parametrize("merge", [False, True])
def test_atomic_directory(tmp_path, merge):
    folder = tmp_path / "model"
    for content in ("old", "new"):
        with training.atomic_directory(folder, merge) as temporary:
            (temporary / "weights").write_text(content)
            (temporary / content).touch()
    assert (folder / "weights").read_text() == "new"
    assert (folder / "old").exists() == merge
    assert sorted(file.name for file in tmp_path.rglob(".*")) == []


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    ("error", "raised"), [(OSError("disk full"), OSError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_atomic_directory_that_fails_changes_nothing(tmp_path, merge, error, raised):
    folder = tmp_path / "model"
    with training.atomic_directory(folder, merge) as temporary:
        (temporary / "weights").write_text("old")
    with pytest.raises(raised), training.atomic_directory(folder, merge) as temporary:  # noqa: PT012
        (temporary / "weights").write_text("new")
        raise error
    assert [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*")] == ["model", "model/weights"]
    assert (folder / "weights").read_text() == "old"


def test_interrupt_between_the_two_renames(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    with training.atomic_directory(folder) as temporary:
        (temporary / "weights").write_text("old")
    replace = training.os.replace

    def interrupted(source, target):
        if "new" in [file.name for file in source.iterdir()]:
            raise KeyboardInterrupt
        replace(source, target)

    with pytest.raises(KeyboardInterrupt), training.atomic_directory(folder) as temporary:  # noqa: PT012
        (temporary / "new").touch()
        monkeypatch.setattr(training.os, "replace", interrupted)
    assert (folder / "weights").read_text() == "old"


def test_write_json_is_all_or_nothing(tmp_path):
    file = tmp_path / "results.json"
    training.write_json(file, {"loss": 1.5})
    with pytest.raises(TypeError):
        training.write_json(file, {"loss": object()})
    assert json.loads(file.read_text()) == {"loss": 1.5}
    assert list(tmp_path.iterdir()) == [file]


def test_loss_curve(tmp_path):
    file = tmp_path / "curve.png"
    training.plot_loss_curve([{"step": 1, "train_loss": 3.0}], file)
    assert not file.exists()
    training.plot_loss_curve([{"step": 1, "loss": 3.0}, {"step": 2, "eval_loss": 2.0}], file)
    assert file.read_bytes().startswith(b"\x89PNG")
    before = file.read_bytes()
    points = [{"step": step, "loss": 3.0 - step % 7} for step in range(100)]
    with pytest.raises(OSError, match="too large"), full_disk(1000):
        training.plot_loss_curve(points, file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_data_files(tmp_path):
    for name, text in {
        "a.txt": "one\ntwo\n",
        "a.csv": "text,label\none,1\n",
        "a.tsv": "text\tlabel\none\t1\n",
        "a.jsonl": '{"text": "one", "label": 1}\n',
    }.items():
        (tmp_path / name).write_text(text)
        data = training.load_data_files(str(tmp_path / "cache"), train=str(tmp_path / name), validation=None)
        assert list(data) == ["train"]
        assert data["train"]["text"][0] == "one"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.csv", None, "missing.csv does not exist"),
        ("empty.csv", "", "empty.csv is empty"),
        ("blank.txt", " \n", "blank.txt is empty"),
        ("header.csv", "text,label\n", "header.csv has no rows"),
        ("a.pdf", "text", r"\.pdf"),
        ("broken.json", "{", r"broken\.json .*cannot be read as json"),
        ("no_rows.json", "[]", r"no_rows\.json has no rows"),
    ],
)
def test_data_files_that_cannot_be_used(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        training.load_data_files(str(tmp_path / "cache"), train=str(tmp_path / name))


# --- Model and loss --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {token: index for index, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdef"])}
    return transformers.RobertaTokenizer(vocab=vocabulary, merges=[])


@pytest.mark.parametrize(("model_type", "positions"), [("linformer", 24), ("roberta", 26), ("bert", 24)])
def test_config_from_scratch_fits_the_longest_input(tokenizer, model_type, positions):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = training.config_from_scratch(model_type, tokenizer, 24, sizes)
    assert config.max_position_embeddings == positions
    assert (config.vocab_size, config.pad_token_id) == (len(tokenizer), 1)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    assert training.longest_input(model) == 24
    model(input_ids=torch.full((1, 24), 5))


def test_config_from_scratch_with_a_list_of_projected_lengths(tokenizer):
    overrides = training.parse_overrides("num_hidden_layers=2,projected_length=[8,4],projection_sharing=headwise")
    config = training.config_from_scratch("linformer", tokenizer, 24, overrides)
    assert (config.projected_lengths, config.max_position_embeddings) == ([8, 4], 24)


@pytest.mark.parametrize("model_type", ["linformer", "roberta"])
def test_config_from_scratch_has_room_for_the_token_types(tokenizer, model_type):
    bert = transformers.BertTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4})
    assert training.config_from_scratch(model_type, bert, 24, {}).type_vocab_size == 2
    assert training.config_from_scratch(model_type, bert, 24, {"type_vocab_size": 3}).type_vocab_size == 3
    default = transformers.CONFIG_MAPPING[model_type]().type_vocab_size
    assert training.config_from_scratch(model_type, tokenizer, 24, {}).type_vocab_size == default


def test_projected_length_that_does_not_fit_is_lowered_unless_given(tokenizer, caplog):
    caplog.set_level("INFO", training.logger.name)
    assert training.config_from_scratch("linformer", tokenizer, 24, {}).projected_length == 12
    assert "projected_length is 12" in caplog.text
    assert training.config_from_scratch("linformer", tokenizer, 24, {"projected_length": 3}).projected_length == 3
    with pytest.raises(Exception, match="projected_length"):
        training.config_from_scratch("linformer", tokenizer, 24, {"projected_length": 25})


def test_a_baseline_is_one_flag_away(tokenizer, caplog):
    caplog.set_level("INFO", training.logger.name)
    config = training.config_from_scratch("roberta", tokenizer, 24, {"projected_length": 8, "hidden_size": 24})
    assert config.hidden_size == 24
    assert not hasattr(config, "projected_length")
    assert "RobertaConfig has no projected_length" in caplog.text
    with pytest.raises(ValueError, match="RobertaConfig has no hiden_size"):
        training.config_from_scratch("roberta", tokenizer, 24, {"hiden_size": 24})


def test_unknown_model_type(tokenizer):
    with pytest.raises(ValueError, match="linfomer"):
        training.config_from_scratch("linfomer", tokenizer, 24, {})


def test_label_loss_is_that_of_the_models():
    torch.manual_seed(0)
    ids = torch.randint(5, 50, (4, 9))
    labels = torch.where(torch.rand(4, 9) < 0.3, ids, -100)
    model = RobertaForMaskedLM(tiny_roberta()).eval()
    outputs = model(input_ids=ids, labels=labels)
    torch.testing.assert_close(training.label_loss(outputs, labels), outputs.loss)
    for options, target in (
        ({"num_labels": 1, "problem_type": "regression"}, torch.rand(4)),
        ({}, torch.tensor([0, 1, 1, 0])),
    ):
        model = RobertaForSequenceClassification(tiny_roberta(**options)).eval()
        outputs = model(input_ids=ids, labels=target)
        torch.testing.assert_close(training.label_loss(outputs, target), outputs.loss)


def test_label_loss_of_parts_adds_up():
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 5, 7), torch.randint(0, 7, (8, 5))
    labels[torch.rand(8, 5) < 0.7] = -100
    count = (labels != -100).sum()
    parts = [training.label_loss({"logits": logits[i : i + 2]}, labels[i : i + 2], count) for i in range(0, 8, 2)]
    torch.testing.assert_close(sum(parts), training.label_loss({"logits": logits}, labels))
    nothing = training.label_loss({"logits": logits}, torch.full_like(labels, -100))
    assert nothing == 0  # and not NaN


def test_perplexity():
    assert training.perplexity(0.0) == 1.0
    assert training.perplexity(1e4) == float("inf")


# --- Saving ----------------------------------------------------------------------------------------------------------


class NumberDataset(torch.utils.data.Dataset):
    """Blocks of nine tokens; label tokens at two of them."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.randint(5, 50, (9,), generator=torch.Generator().manual_seed(index))
        labels = torch.where(torch.arange(9) < 2, ids, -100)
        return {"input_ids": ids, "labels": labels}


def make_trainer(folder, callbacks=(), **options):
    args = training.TrainingArguments(
        output_dir=str(folder), report_to="none", max_steps=4, save_steps=1, disable_tqdm=True, **options
    )
    torch.manual_seed(0)
    model = RobertaForMaskedLM(tiny_roberta())
    data = NumberDataset()
    return training.Trainer(model=model, args=args, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


@contextlib.contextmanager
def full_disk(limit=8000):
    """No file may grow beyond that many bytes: the kernel refuses, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def train_accelerate(folder, checkpoint=None, limit_at=None, **options):
    torch.manual_seed(0)
    args = training.AccelerateArguments(
        output_dir=str(folder), report_to="none", max_steps=4, save_steps=1, logging_steps=1, do_train=True, **options
    )
    model = RobertaForMaskedLM(tiny_roberta())
    vocabulary = {token: index for index, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])}
    run = training.AccelerateRun(args, model, transformers.RobertaTokenizer(vocab=vocabulary, merges=[]), checkpoint)
    save = run._save_checkpoint

    def save_on_a_full_disk():
        with full_disk() if run.state["global_step"] == limit_at else contextlib.nullcontext():
            save()

    run._save_checkpoint = save_on_a_full_disk
    results = run.train(NumberDataset(), transformers.default_data_collator)
    return run.finish(results)


class FullDiskAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step
        self.stack = contextlib.ExitStack()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.stack.enter_context(full_disk())


@pytest.mark.parametrize("script", ["trainer", "accelerate"])
def test_full_disk_while_a_checkpoint_is_saved(tmp_path, script):
    if script == "trainer":
        callback = FullDiskAt(3)
        with pytest.raises(OSError, match=r"Could not save .*checkpoint-3"), callback.stack:
            make_trainer(tmp_path, [callback]).train()
    else:
        with pytest.raises(OSError, match=r"Could not save .*checkpoint-3"):
            train_accelerate(tmp_path, limit_at=3)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    newest = training.newest_checkpoint(tmp_path)
    assert newest == str(tmp_path / "checkpoint-2")
    RobertaForMaskedLM.from_pretrained(newest)
    if script == "trainer":
        assert make_trainer(tmp_path).train(resume_from_checkpoint=newest).global_step == 4
    else:
        train_accelerate(tmp_path, checkpoint=newest)
    assert training.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_interrupt_while_a_checkpoint_is_saved(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    trainer.args.max_steps = 2
    trainer.train()

    def interrupted(self, output_dir):
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "_save_optimizer_and_scheduler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]


def test_interrupt_while_the_final_model_is_saved(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    trainer.save_model()
    before = (tmp_path / "model.safetensors").read_bytes()
    torch.nn.init.zeros_(trainer.model.lm_head.dense.weight)
    with pytest.raises(OSError, match="Could not save"), full_disk():
        trainer.save_model()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert weights.keys()
    assert not list(tmp_path.glob(".*"))


def test_rotation_best_checkpoint_and_state(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 2}
    trainer = make_trainer(tmp_path, learning_rate=1e-2, **options)
    trainer.train()
    best = tmp_path / f"checkpoint-{trainer.state.best_global_step}"
    assert trainer.state.best_model_checkpoint == str(best)
    assert best.is_dir()
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)


def test_evaluation_leaves_the_random_state_alone(tmp_path):
    trainer = make_trainer(tmp_path)
    before = torch.random.get_rng_state()
    trainer.evaluate()
    assert torch.equal(before, torch.random.get_rng_state())


def test_train_loss_and_log_of_a_resumed_run(tmp_path):
    options = {"logging_steps": 2}
    whole = make_trainer(tmp_path, **options)
    expected = whole.train().training_loss
    for step in (2, 4):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    shutil.rmtree(tmp_path / "checkpoint-3")
    resumed = make_trainer(tmp_path, **options)
    metrics = resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1")).metrics
    assert metrics["train_loss"] == pytest.approx(expected, abs=1e-6)
    losses = [
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (whole, resumed)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_adapters_get_the_card_of_transformers(tmp_path):
    peft = pytest.importorskip("peft")
    trainer = make_trainer(tmp_path, do_train=True)
    trainer.model = peft.get_peft_model(trainer.model, peft.LoraConfig(target_modules=["query"]))
    trainer.finish({"eval_loss": 1.0}, dataset="numbers")
    assert not (tmp_path / "config.json").exists()
    assert "library_name: peft" in (tmp_path / "README.md").read_text()


def test_a_dataset_can_be_used_by_the_loader(tmp_path):
    rows = datasets.Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [5, -100, -100]}] * 8)
    args = training.AccelerateArguments(output_dir=str(tmp_path), report_to="none", max_steps=1, save_strategy="no")
    run = training.AccelerateRun(args, RobertaForMaskedLM(tiny_roberta()), None)
    assert run.train(rows, transformers.default_data_collator)["train_loss"] > 0


class FakeHub:
    """Notes what would be uploaded."""

    def __init__(self):
        self.uploads = []

    def create_repo(self, repo_id, **options):
        return type("Repo", (), {"repo_id": f"me/{repo_id}"})

    def upload_folder(self, *, repo_id, folder_path, **options):
        self.uploads.append((repo_id, sorted(file.name for file in Path(folder_path).iterdir())))
        return SimpleNamespace(is_done=lambda: True, done=lambda: True)


@pytest.mark.parametrize("script", ["trainer", "accelerate"])
def test_push_to_hub(tmp_path, monkeypatch, script):
    hub = FakeHub()
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    monkeypatch.setattr(training, "HfApi", lambda token: hub)
    if script == "trainer":
        trainer = make_trainer(tmp_path, push_to_hub=True, hub_model_id="numbers", do_train=True)
        trainer.train()
        trainer.finish({"eval_loss": 1.0}, dataset="numbers")
        assert "Data: numbers." in (tmp_path / "README.md").read_text()
    else:
        train_accelerate(tmp_path, push_to_hub=True, hub_model_id="numbers")
    repo_id, files = hub.uploads[-1]
    assert repo_id == "me/numbers"
    assert {"model.safetensors", "config.json", "all_results.json", "README.md"} <= set(files)
    assert not [name for name in files if name.startswith(".tmp")]
