import json
import shlex
from pathlib import Path

import pytest
from conftest import HEADS, build
from hubserver import card_errors
from huggingface_hub import ModelCard

import linformer_hf
from linformer_hf import training
from linformer_hf.model_card import TEMPLATE, Result, write_model_card


CARDS = Path(__file__).parents[1] / "model_cards"
FIGURES = {
    "epoch": 3.0,
    "eval_accuracy": 0.9226,
    "eval_accuracy_mm": 0.9,
    "eval_runtime": 3.2,
    "eval_samples_per_second": 100.0,
    "train_loss": 1.5,
    "eval_loss": 0.3,
    "truncated_examples": 4,
}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with the figures of a run."""
    folder = tmp_path / "my-linformer"
    build("LinformerForSequenceClassification", num_labels=3, local_attention_window=5).save_pretrained(folder)
    (folder / "all_results.json").write_text(json.dumps(FIGURES))
    return folder


def test_a_card_is_filled_from_the_folder(folder):
    command = f"python run_glue.py {Path.cwd()}/recipe.json --cache_dir {Path.home()}/cache --task_name mnli"
    command += " --tokenizer_name x --hub_token hf_secret --seed 3"
    card = write_model_card(
        folder, command=command, recipe={"seed": 3, "push_to_hub_token": "hf_secret"}, datasets=["nyu-mll/glue"]
    )
    assert (folder / "README.md").read_text() == str(card)
    card = ModelCard.load(folder / "README.md")
    assert card_errors(card.content) == []
    data = card.data
    assert (data.library_name, data.license, data.pipeline_tag) == ("transformers", "unknown", "text-classification")
    assert set(data.tags) == {"linformer", "custom_code"}
    assert data.datasets == ["nyu-mll/glue"]
    assert data.metrics == ["accuracy", "loss"]
    assert data.model_name == "my-linformer"
    results = {(r.metric_type, r.metric_name): (r.metric_value, r.dataset_type) for r in data.eval_results}
    assert results == {
        ("accuracy", "accuracy"): (0.9226, "nyu-mll/glue"),
        ("accuracy", "accuracy_mm"): (0.9, "nyu-mll/glue"),
        ("loss", "loss"): (0.3, "nyu-mll/glue"),
    }
    assert "hf_secret" not in card.content
    assert "python run_glue.py recipe.json --cache_dir ~/cache --task_name mnli" in card.text
    assert "--tokenizer_name x --hub_token ... --seed 3" in card.text
    assert '"seed": 3' in card.text
    for heading in ("Intended use", "Limits", "How it was made", "Results"):
        assert f"\n## {heading}\n" in card.text
    assert "k = 7 projected positions" in card.text
    assert "w = 5 tokens" in card.text
    assert "The longest input has 61 tokens." in card.text
    assert "| eval_accuracy | 0.9226 | as above |" in card.text
    assert "runtime" not in card.text
    model = linformer_hf.LinformerForSequenceClassification.from_pretrained(folder)
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.3g} million parameters" in card.text
    assert "{{" not in card.content
    assert "None" not in card.content


@pytest.mark.parametrize(("auto_class", "head"), HEADS.items())
def test_each_head_has_its_task(auto_class, head, tmp_path):
    build(head).save_pretrained(tmp_path)
    card = write_model_card(tmp_path, name="me/model")
    assert card_errors(str(card)) == []
    assert f'{auto_class}.from_pretrained("me/model", trust_remote_code=True)' in card.text
    assert "Not measured." in card.text
    assert "AutoTokenizer" not in card.text
    (tmp_path / "tokenizer.json").touch()
    # without the package, the tokenizer's Auto class asks for the configuration's code, too
    with_tokenizer = write_model_card(tmp_path, name="me/model").text
    assert 'tokenizer = AutoTokenizer.from_pretrained("me/model", trust_remote_code=True)\nmodel = ' in with_tokenizer
    assert card.data.eval_results is None


def test_figures_with_their_own_commands_and_where_it_came_from(folder):
    results = [
        Result("spearmanr, 500 tokens", 0.97451, "python agreement.py"),
        Result("accuracy", 0.5, "python rxnfp.py"),
    ]
    card = write_model_card(
        folder, results=results, base_model="google/bert", license="mit", language="en", tags=["chemistry"]
    )
    assert "| spearmanr, 500 tokens | 0.9745 | python agreement.py |" in card.text
    assert "as above" not in card.text
    assert card.data.metrics == ["accuracy", "spearmanr"]
    assert (card.data.base_model, card.data.license, card.data.language) == ("google/bert", "mit", "en")
    assert "chemistry" in card.data.tags
    # a folder is no model on the Hub, and where it lies is nobody's business
    source = folder.parent / "source"
    source.mkdir()
    card = write_model_card(folder, base_model=str(source), datasets=[str(folder / "all_results.json")])
    assert card.data.base_model is None
    assert card.data.datasets is None
    assert "made from source." in card.text
    assert "Data: all_results.json." in card.text
    assert str(folder.parent) not in str(card)


def test_data_in_words_are_no_dataset_on_the_hub(folder):
    card = write_model_card(folder, datasets=["speeches of two centuries"])
    assert card.data.datasets is None
    assert card.data.eval_results[0].dataset_name == "speeches of two centuries"
    assert "Data: speeches of two centuries." in card.text


def test_a_home_at_the_root_changes_no_path(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/")
    assert "--output_dir /a/b" in write_model_card(folder, command="python x.py --output_dir /a/b").text


def test_any_other_class_gets_a_card_too(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mine", "architectures": ["MyNetwork"]}')
    card = write_model_card(tmp_path)
    assert "A mine model for feature-extraction (MyNetwork, unknown million parameters)" in card.text


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config.json"):
        write_model_card(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [training.TrainingArguments, training.AccelerateArguments])
def test_arguments_know_their_command_and_recipe(tmp_path, kind):
    recipe = tmp_path / "recipe.json"
    recipe.write_text('{"max_steps": 7}')
    (args,) = training.parse_arguments(kind, argv=[str(recipe), "--output_dir", "a b"])
    assert shlex.split(args.command) == ["python", "test_model_card.py", str(recipe), "--output_dir", "a b"]
    assert args.recipe == {"max_steps": 7}
    assert kind(output_dir="x").command is None


def test_the_template_is_the_package_s():
    assert (CARDS / "template.md").samefile(TEMPLATE)
    made = {"minilm-linformer", "rxnfp-linformer", "quickstart-mlm", "quickstart-topics"}
    assert made <= {path.stem for path in CARDS.glob("*.md")}


@pytest.mark.parametrize("path", sorted(set(CARDS.glob("*.md")) - {CARDS / "template.md"}), ids=lambda path: path.stem)
def test_cards_of_this_project_are_valid(path):
    card = ModelCard.load(path)
    assert card_errors(card.content) == []
    assert card.data.library_name == "transformers"
    assert card.data.license
    assert card.data.eval_results
    assert "## How it was made\n\n```bash\n" in card.text
