import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import (
    HEADS,
    LEARNED,
    SHARINGS,
    STORED,
    TOLERANCE,
    TYPES,
    build,
    difference,
    fill_with_noise,
    mask_of,
    random_ids,
    tiny_config,
)
from safetensors import safe_open
from transformers import AutoModel, AutoModelForMaskedLM

import linformer_hf
from linformer_hf import LinformerForMaskedLM, LinformerModel


CODE = {"configuration_linformer.py", "projections_linformer.py", "modeling_linformer.py"}

# with LayerNorms of its own; no projection at all; none in one layer
WINDOWED = [
    {"projection_type": "convolution", "local_attention_window": 5, "num_global_tokens": 2, "dual_layer_norm": True},
    {"projected_length": 0, "local_attention_window": 5},
    {"projected_length": [7, 0], "local_attention_window": [0, 5], "projection_sharing": "headwise"},
]

STORED_AND_SHARINGS = [{"projection_type": t, "projection_sharing": s} for t, s in itertools.product(STORED, SHARINGS)]
TYPES_AND_SHARINGS = [{"projection_type": t, "projection_sharing": s} for t, s in itertools.product(TYPES, SHARINGS)]


def option_names(options):
    return "-".join(value if isinstance(value, str) else f"{name}={value}" for name, value in options.items())


every_class = pytest.mark.parametrize("head", HEADS.values())
every_sharing = pytest.mark.parametrize("sharing", SHARINGS)


def same_tensors(first, second):
    """Names, dtypes and bits agree."""
    assert list(first) == list(second)
    different = [name for name in first if first[name].dtype != second[name].dtype]
    different += [name for name in first if difference(first[name], second[name]) > TOLERANCE["exact"]]
    assert different == []


# ---- save and load


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [*TYPES_AND_SHARINGS, *WINDOWED], ids=option_names)
def test_saving_and_loading_is_exact(options, tied, tmp_path):
    model = build("LinformerForMaskedLM", **options, tie_word_embeddings=tied)
    ids, mask = random_ids(3, 61), mask_of("holes", 3, 61)
    before = model(ids, mask).logits
    model.save_pretrained(tmp_path)

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    expected = set(model.state_dict()) - ({"lm_head.decoder.weight"} if tied else set())
    assert stored == expected  # each projection once, under its one name

    for loaded in (LinformerForMaskedLM.from_pretrained(tmp_path), AutoModelForMaskedLM.from_pretrained(tmp_path)):
        assert type(loaded) is LinformerForMaskedLM
        assert not loaded.training
        same_tensors(model.state_dict(), loaded.state_dict())
        same_tensors(dict(model.named_buffers()), dict(loaded.named_buffers()))
        assert torch.equal(loaded(ids, mask).logits, before)
        assert (loaded.lm_head.decoder.weight is loaded.get_input_embeddings().weight) == tied
        assert loaded.config.tie_word_embeddings is tied
        assert loaded.num_parameters() == model.num_parameters()


def load_report(model_class, folder, **kwargs):
    _, info = model_class.from_pretrained(folder, output_loading_info=True, **kwargs)
    return {name: set(keys) for name, keys in info.items() if keys}


@every_class
def test_nothing_is_missing_or_left_over(head, tmp_path):
    model = build(head, num_labels=3)
    model.save_pretrained(tmp_path)
    assert load_report(getattr(linformer_hf, head), tmp_path) == {}


@pytest.mark.parametrize("options", [*TYPES_AND_SHARINGS, *WINDOWED], ids=option_names)
def test_a_base_model_loads_in_a_head_and_back(options, tmp_path):
    base = build(**options)
    base.save_pretrained(tmp_path / "base")
    report = load_report(LinformerForMaskedLM, tmp_path / "base")
    assert set(report) == {"missing_keys"}
    assert all(name.startswith("lm_head.") for name in report["missing_keys"])
    model = LinformerForMaskedLM.from_pretrained(tmp_path / "base")
    same_tensors(base.state_dict(), model.linformer.state_dict())
    assert all(value.isfinite().all() for value in model.state_dict().values())
    model.save_pretrained(tmp_path / "head")
    same_tensors(base.state_dict(), LinformerModel.from_pretrained(tmp_path / "head").state_dict())


@pytest.mark.parametrize("sharing", SHARINGS)
def test_projections_that_a_checkpoint_lacks_start_as_new_ones(sharing, tmp_path):
    # a pooling has no projection, so that a linear model from its checkpoint starts with fresh ones; the rest is kept
    pooling = build("LinformerForMaskedLM", projection_type="mean_pooling")
    pooling.save_pretrained(tmp_path)
    for kind in STORED:
        model = LinformerForMaskedLM.from_pretrained(tmp_path, projection_type=kind, projection_sharing=sharing)
        fresh = LinformerForMaskedLM(tiny_config(projection_type=kind, projection_sharing=sharing)).state_dict()
        new = {name: value for name, value in model.state_dict().items() if "projection" in name}
        same_tensors({n: v for n, v in model.state_dict().items() if n not in new}, pooling.state_dict())
        assert list(new) == [name for name in fresh if "projection" in name]
        for name, value in new.items():
            if kind == "random":
                assert torch.equal(value, fresh[name])
            else:
                assert 0 < difference(value, fresh[name]) < 0.03  # both are pooling with noise of std 0.002


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", STORED)
def test_half_precision_survives(kind, dtype, tmp_path):
    model = build("LinformerForMaskedLM", projection_type=kind).to(dtype)
    model.save_pretrained(tmp_path)
    loaded = LinformerForMaskedLM.from_pretrained(tmp_path)
    assert loaded.dtype is dtype
    same_tensors(model.state_dict(), loaded.state_dict())
    full = LinformerForMaskedLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {value.dtype for value in full.state_dict().values()} == {torch.float32}


def test_random_projections_come_from_the_file_and_not_from_the_seed(tmp_path):
    model = build(projection_type="random", projection_seed=1)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "projection_seed": 2}))
    same_tensors(model.state_dict(), LinformerModel.from_pretrained(tmp_path).state_dict())


@every_sharing
@pytest.mark.parametrize("kind", LEARNED)
def test_freezing_survives_loading(kind, sharing, tmp_path):
    options = {"projection_type": kind, "projection_sharing": sharing}
    build("LinformerForMaskedLM", **options, freeze_projections=True).save_pretrained(tmp_path / "frozen")
    build("LinformerForMaskedLM", **options).save_pretrained(tmp_path / "free")
    loads = {
        "frozen": (LinformerForMaskedLM.from_pretrained(tmp_path / "frozen"), True),
        "from another class": (LinformerModel.from_pretrained(tmp_path / "frozen"), True),
        "frozen when loaded": (LinformerForMaskedLM.from_pretrained(tmp_path / "free", freeze_projections=True), True),
        "free": (LinformerForMaskedLM.from_pretrained(tmp_path / "free"), False),
        "thawed when loaded": (
            LinformerForMaskedLM.from_pretrained(tmp_path / "frozen", freeze_projections=False),
            False,
        ),
        "automatically": (AutoModel.from_pretrained(tmp_path / "frozen"), True),
    }
    for name, (model, frozen) in loads.items():
        for parameter_name, parameter in model.named_parameters():
            assert parameter.requires_grad is not (frozen and "projection" in parameter_name), (name, parameter_name)


def test_freezing_survives_loading_without_the_projections(tmp_path):
    build("LinformerForMaskedLM", projection_type="mean_pooling").save_pretrained(tmp_path)
    model = LinformerForMaskedLM.from_pretrained(tmp_path, projection_type="linear", freeze_projections=True)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [
        "linformer.encoder.shared_projection.weight"
    ]


@every_sharing
def test_sharded_checkpoints(sharing, tmp_path):
    model = build("LinformerForMaskedLM", projection_sharing=sharing)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    same_tensors(model.state_dict(), LinformerForMaskedLM.from_pretrained(tmp_path).state_dict())


@pytest.mark.parametrize("kind", STORED)
def test_pickling_and_state_dicts(kind):
    model = build("LinformerForMaskedLM", projection_type=kind)
    same_tensors(model.state_dict(), pickle.loads(pickle.dumps(model)).state_dict())
    other = build("LinformerForMaskedLM", projection_type=kind, seed=5, projection_seed=9)
    other.load_state_dict(model.state_dict())
    same_tensors(model.state_dict(), other.state_dict())
    ids = random_ids(1, 61)
    assert torch.equal(model(ids).logits, other(ids).logits)


@pytest.mark.parametrize("options", [*STORED_AND_SHARINGS, *WINDOWED], ids=option_names)
def test_parts_of_a_model_may_stay_on_disk(options, tmp_path):
    # as with a model over several devices, accelerate moves every layer's arguments to where the layer is
    model = build(**options)
    model.save_pretrained(tmp_path)
    places = {"embeddings": "disk", "encoder.layer.0": "disk", "encoder.layer.1": "cpu"}
    if model.encoder.shared_projection is not None:
        places["encoder.shared_projection"] = "disk"
    loaded = LinformerModel.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "disk")
    assert loaded.embeddings.word_embeddings.weight.is_meta
    ids, mask = random_ids(2, 61), mask_of("holes", 2, 61)
    with torch.no_grad():
        assert torch.equal(loaded(ids, mask)[0], model(ids, mask)[0])


# ---- the code in the folder


def assert_folder_is_complete(folder):
    assert {path.name for path in Path(folder).glob("*.py")} >= CODE
    auto_map = json.loads((Path(folder) / "config.json").read_text())["auto_map"]
    assert auto_map == {
        "AutoConfig": "configuration_linformer.LinformerConfig",
        **{auto: f"modeling_linformer.{head}" for auto, head in HEADS.items()},
    }
    source = Path(linformer_hf.__file__).parent
    assert all((Path(folder) / name).read_text() == (source / name).read_text() for name in CODE)


@every_class
def test_every_saved_folder_carries_its_code(head, tmp_path):
    model = build(head)
    model.save_pretrained(tmp_path / "first")
    assert_folder_is_complete(tmp_path / "first")
    again = getattr(linformer_hf, head).from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "second")
    assert_folder_is_complete(tmp_path / "second")


def test_a_saved_configuration_carries_its_own_code(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "configuration_linformer.py"}
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map == {"AutoConfig": "configuration_linformer.LinformerConfig"}


WITHOUT_THE_PACKAGE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "linformer_hf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch
import transformers

folder, task = sys.argv[1:]
tolerance, expected = torch.load(f"{folder}/expected.pt")
torch.set_num_threads(1)
for time in range(2):
    for auto, (name, state, inputs, right) in expected.items():
        if task == "load":
            source = f"{folder}/{name}"
        else:
            source = f"{folder}/again/{name}"
        model = getattr(transformers, auto).from_pretrained(source, trust_remote_code=True)
        assert type(model).__name__ == name, type(model)
        assert "transformers_modules" in type(model).__module__, type(model)
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items()), (auto, time)
        # matrix products may round by where in memory the weights lie, those with one output do on some machines
        with torch.no_grad():
            assert (model(*inputs)[0] - right).abs().max() < tolerance, (auto, time)
        if task == "load" and time:
            model.save_pretrained(f"{folder}/again/{name}")
    # every Auto class takes the same folder, whatever head it was saved with
    for auto in expected:
        getattr(transformers, auto).from_pretrained(f"{folder}/LinformerForMaskedLM", trust_remote_code=True)
    config = transformers.AutoConfig.from_pretrained(f"{folder}/LinformerForMaskedLM", trust_remote_code=True)
    assert config.projected_length == 7
    frozen = transformers.AutoModel.from_pretrained(
        f"{folder}/LinformerForMaskedLM", trust_remote_code=True, freeze_projections=True
    )
    assert [p for n, p in frozen.named_parameters() if not p.requires_grad and "projection" in n]
    fresh = transformers.AutoModelForMaskedLM.from_config(config, trust_remote_code=True)
    assert all(value.isfinite().all() for value in fresh.state_dict().values())
try:
    transformers.AutoModel.from_pretrained(
        f"{folder}/LinformerForMaskedLM", trust_remote_code=True, projected_length=62
    )
except Exception as error:
    assert "projected_length" in str(error) and "62" in str(error), error
else:
    raise AssertionError("a wrong configuration was taken")
assert "linformer_hf" not in sys.modules
print("loaded", len(expected))
"""


def run_python(code, *arguments, modules=None):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if modules is not None:
        environment |= {"HF_MODULES_CACHE": str(modules)}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=arguments[0] if arguments else None,
        timeout=300,
        check=False,
    )


def test_folders_load_in_clean_processes_without_the_package(tmp_path):
    expected = {}
    ids, mask = random_ids(2, 61), mask_of("holes", 2, 61)
    for number, (auto, head) in enumerate(HEADS.items()):
        options = {"projection_type": TYPES[number % 5], "projection_sharing": SHARINGS[number % 4]}
        if head == "LinformerForMaskedLM":
            options = {}
        elif number in (2, 3, 4):
            options = WINDOWED[number - 2]
        model = build(head, **options)
        model.save_pretrained(tmp_path / head)
        inputs = (ids[:, None], mask[:, None]) if "Choice" in head else (ids, mask)
        with torch.no_grad():
            expected[auto] = (head, model.state_dict(), inputs, model(*inputs)[0])
    torch.save((TOLERANCE["float32"], expected), tmp_path / "expected.pt")
    # the second process finds the first one's cache, and loads what that one saved
    for task in ("load", "load again"):
        result = run_python(WITHOUT_THE_PACKAGE, tmp_path, task, modules=tmp_path / "modules")
        assert result.returncode == 0, result.stderr[-3000:]
        assert result.stdout.strip() == "loaded 6"
    for head in HEADS.values():
        assert_folder_is_complete(tmp_path / "again" / head)


# ---- resuming


@pytest.mark.parametrize("tied", [True, False])
@every_sharing
def test_accelerate_restores_every_bit(sharing, tied, tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = build("LinformerForMaskedLM", projection_sharing=sharing, tie_word_embeddings=tied).train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ids = random_ids(2, 61)

    def step():
        loss = model(ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    accelerator.save_state(tmp_path)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    after = [step(), step()]
    assert after[0] != after[1]
    fill_with_noise(model, seed=7)
    accelerator.load_state(tmp_path)
    same_tensors(saved, model.state_dict())
    assert [step(), step()] == after


@pytest.mark.parametrize("sharing", ["none", "layerwise"])
def test_trainer_resumes_to_the_same_weights(sharing, tmp_path):
    from transformers import Trainer, TrainingArguments

    examples = [{"input_ids": random_ids(1, 61, seed)[0], "labels": random_ids(1, 61, seed)[0]} for seed in range(12)]

    def train(folder, resume=None, steps=6):
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            max_steps=steps,
            save_steps=3,
            lr_scheduler_type="constant",
            learning_rate=1e-2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        model = build("LinformerForMaskedLM", projection_sharing=sharing, hidden_dropout_prob=0.1)
        trainer = Trainer(model, arguments, train_dataset=examples, eval_dataset=examples)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train(tmp_path / "whole")
    train(tmp_path / "parts", steps=3)
    resumed = train(tmp_path / "parts", resume=str(tmp_path / "parts" / "checkpoint-3"))
    same_tensors(whole.model.state_dict(), resumed.model.state_dict())
    # and what is saved evaluates as what is in memory
    assert_folder_is_complete(tmp_path / "whole" / "checkpoint-6")
    in_memory = whole.evaluate()["eval_loss"]
    whole.model = LinformerForMaskedLM.from_pretrained(tmp_path / "whole" / "checkpoint-6")
    assert whole.evaluate()["eval_loss"] == in_memory
