import csv
import json
import random
import sys
from pathlib import Path

import datasets
import evaluate
import numpy as np
import pytest
import torch
import transformers
from hubserver import card_errors
from huggingface_hub import ModelCard
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from linformer_hf import training


EXAMPLES = Path(__file__).parents[1] / "examples" / "glue"
sys.path.insert(0, str(EXAMPLES))

import glue_data  # noqa: E402
import run_glue  # noqa: E402
import run_glue_no_trainer  # noqa: E402


SCRIPTS = {"trainer": run_glue.main, "accelerate": run_glue_no_trainer.main}
WORDS = {"arts": ["opera", "poem"], "science": ["atom", "cell"], "sport": ["goal", "race"]}


@pytest.fixture(autouse=True)
def no_cache_from_earlier_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture(scope="module", params=["linformer", "roberta"])
def any_model(request, tmp_path_factory):
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("linformer", tmp_path_factory.mktemp("model"))


def make_model(model_type, folder):
    """A masked LM of 24 positions, with a tokenizer that knows one token for each word and each letter."""
    words = [word for pair in WORDS.values() for word in pair]
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "the", *words, *"abcdefghijklmnopqrstuvwxyz", "Ġ"]
    vocabulary = {name: index for index, name in enumerate(names)}
    merges = []
    for word in ("the", *words):
        for end in range(2, len(word) + 1):
            vocabulary.setdefault(word[:end], len(vocabulary))
            merges.append((word[: end - 1], word[end - 1]))
    tokenizer = transformers.RobertaTokenizer(
        vocab=vocabulary, merges=list(dict.fromkeys(merges)), model_max_length=24
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes["initializer_range"] = 0.1  # so small a model learns nothing in seconds with the usual 0.02
    torch.manual_seed(0)
    config = training.config_from_scratch(model_type, tokenizer, 24, sizes)
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_csv(file, columns, rows):
    with file.open("w", newline="") as handle:
        csv.writer(handle).writerows([columns, *rows])
    return str(file)


def topics(count, seed, length=4):
    generator = random.Random(seed)
    labels = [generator.choice(sorted(WORDS)) for _ in range(count)]
    return [[" ".join(generator.choices([*WORDS[label], "the"], k=length)), label] for label in labels]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Texts on three topics that one word tells apart."""
    folder = tmp_path_factory.mktemp("topics")
    return {
        split: write_csv(folder / f"{split}.csv", ["text", "label"], topics(count, count))
        for split, count in {"train": 96, "validation": 40, "test": 12}.items()
    }


@pytest.fixture
def flags(tmp_path, model, files):
    def make(*more, folder="out"):
        given = {"model_name_or_path": str(model), "cache_dir": str(tmp_path / "cache"), "report_to": "none"}
        given |= {"output_dir": str(tmp_path / folder), "learning_rate": "5e-3", "logging_steps": "4"}
        given |= {f"{split}_file": file for split, file in files.items()}
        return [*(part for name, value in given.items() for part in (f"--{name}", value)), *more]

    return make


def predictions(file):
    lines = file.read_text().splitlines()
    assert lines[0] == "index\tprediction"
    return [line.split("\t")[1] for line in lines[1:]]


# --- The whole run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_topics(tmp_path, any_model, flags, script):
    more = ["--do_train", "--do_eval", "--do_predict", "--num_train_epochs", "6", "--eval_strategy", "epoch"]
    results = SCRIPTS[script](flags(*more, "--model_name_or_path", str(any_model)))
    output = tmp_path / "out"
    assert json.loads((output / "all_results.json").read_text()) == results
    assert results["eval_accuracy"] > 0.9
    assert results["eval_macro_f1"] > 0.9
    assert results["truncated_examples"] == 0
    assert (output / "loss_curve.png").is_file()
    given = [row[1] for row in topics(12, 12)]
    found = predictions(output / "predict_results.txt")
    assert np.mean([a == b for a, b in zip(found, given, strict=True)]) > 0.8
    classifier = AutoModelForSequenceClassification.from_pretrained(output)
    assert classifier.config.id2label == {0: "arts", 1: "science", 2: "sport"}
    assert classifier.config.label2id == {"arts": 0, "science": 1, "sport": 2}
    pipeline = transformers.pipeline(
        "text-classification", model=classifier, tokenizer=AutoTokenizer.from_pretrained(output)
    )
    assert pipeline("opera poem opera")[0]["label"] == "arts"
    card = ModelCard.load(output / "README.md")
    assert card_errors(card.content) == []
    assert (card.data.pipeline_tag, card.data.datasets) == ("text-classification", None)  # a file is no dataset
    measured = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert measured["accuracy"] == results["eval_accuracy"]
    assert str(tmp_path) not in card.content.partition("```bash")[0]  # folders are nobody's business


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_fine_tuned_model_is_evaluated_again_without_training_data(tmp_path, flags, script):
    results = SCRIPTS[script](flags("--do_train", "--do_eval", "--max_steps", "8"))
    again = ["--do_eval", "--do_predict", "--model_name_or_path", str(tmp_path / "out")]
    assert SCRIPTS[script](flags(*again, folder="again"))["eval_loss"] == pytest.approx(results["eval_loss"], abs=1e-6)
    assert set(predictions(tmp_path / "again" / "predict_results.txt")) <= set(WORDS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, flags, script, monkeypatch):
    argv = ["--do_train", "--do_eval", "--max_steps", "10", "--save_steps", "3", "--eval_strategy", "epoch"]
    expected = SCRIPTS[script](flags(*argv, folder="whole"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        saved = training.write_json if script == "accelerate" else training.Trainer._save_rng_state

        def interrupted(*arguments):
            if "checkpoint-6" in str(arguments):
                raise KeyboardInterrupt
            return saved(*arguments)

        target = (training, "write_json") if script == "accelerate" else (training.Trainer, "_save_rng_state")
        patch.setattr(*target, interrupted)
        SCRIPTS[script](flags(*argv, folder="killed"))
    assert [folder.name for folder in (tmp_path / "killed").glob("checkpoint-*")] == ["checkpoint-3"]
    results = SCRIPTS[script](flags(*argv, "--resume_from_checkpoint", "true", folder="killed"))
    for name in ("eval_loss", "train_loss", "eval_accuracy"):
        assert results[name] == pytest.approx(expected[name], abs=1e-6), name


def test_both_scripts_agree_and_padding_to_full_length_changes_nothing(flags, tmp_path):
    torch.manual_seed(0)
    argv = ["--do_train", "--do_eval", "--max_steps", "6", "--per_device_eval_batch_size", "64"]
    argv += ["--config_overrides", "hidden_dropout_prob=0,attention_probs_dropout_prob=0"]
    results = [main(flags(*argv, folder=script)) for script, main in SCRIPTS.items()]
    results.append(run_glue.main(flags(*argv, "--pad_to_max_length", folder="padded")))
    for other in results[1:]:
        for name in ("train_loss", "eval_loss", "eval_accuracy"):
            assert other[name] == pytest.approx(results[0][name], abs=1e-5), name


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", ["csv", "json"])
def test_regression(tmp_path, flags, script, kind):
    rows = [[" ".join(["opera"] * count + ["the"] * (8 - count)), count / 2] for count in range(8)] * 8
    if kind == "csv":
        file = write_csv(tmp_path / "data.csv", ["text", "score"], rows)
    else:
        file = str(tmp_path / "data.json")
        lines = [json.dumps({"text": text, "score": score}) for text, score in rows]
        Path(file).write_text("\n".join(lines))
    argv = ["--train_file", file, "--validation_file", file, "--test_file", file, "--label_column_name", "score"]
    argv += ["--do_train", "--do_eval", "--do_predict", "--num_train_epochs", "6"]
    results = SCRIPTS[script](flags(*argv))
    assert results["eval_spearman"] > 0.8
    assert "eval_accuracy" not in results
    assert len([float(value) for value in predictions(tmp_path / "out" / "predict_results.txt")]) == 64
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.problem_type == "regression"
    argv = ["--test_file", file, "--do_predict", "--model_name_or_path", str(tmp_path / "out")]
    SCRIPTS[script](flags(*argv, folder="again"))
    again, first = (predictions(tmp_path / folder / "predict_results.txt") for folder in ("again", "out"))
    assert [float(value) for value in again] == pytest.approx([float(value) for value in first], abs=2e-4)


def test_whole_numbers_are_classes_unless_regression_is_asked_for(tmp_path, flags):
    file = write_csv(tmp_path / "data.csv", ["text", "label"], [["opera", 10], ["atom", 9], ["goal", 10]] * 4)
    argv = ["--train_file", file, "--validation_file", file, "--do_train", "--do_eval", "--max_steps", "1"]
    assert "eval_accuracy" in run_glue.main(flags(*argv))
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config
    assert config.id2label == {0: "9", 1: "10"}  # by value
    assert "eval_pearson" in run_glue.main(flags(*argv, "--do_regression", folder="regression"))


# --- GLUE ------------------------------------------------------------------------------------------------------------


def glue_splits(task):
    """Splits as the Hub has them, with a ClassLabel where the task has classes and -1 in the test split."""
    table = glue_data.TASKS[task]
    classes = {"mnli": ["entailment", "neutral", "contradiction"], "imdb": ["neg", "pos"]}.get(task, ["no", "yes"])
    label = datasets.Value("float32") if table.regression else datasets.ClassLabel(names=classes)
    columns = {column: datasets.Value("string") for column in table.text_columns}
    features = datasets.Features({**columns, "label": label, "idx": datasets.Value("int32")})

    def split(count, labelled=True):
        generator = random.Random(count)
        rows = []
        for index in range(count):
            texts = {column: " ".join(generator.choices(["opera", "atom", "goal"], k=3)) for column in columns}
            value = generator.random() * 5 if table.regression else generator.randrange(len(classes))
            rows.append({**texts, "label": value if labelled else -1, "idx": index})
        return datasets.Dataset.from_list(rows, features=features)

    names = [*table.validation.values(), *table.test.values()]
    return datasets.DatasetDict(
        {"train": split(16)}
        | {name: split(8 + i, "test" not in name or task == "imdb") for i, name in enumerate(names)}
    )


OFFICIAL = {
    "cola": ["matthews_correlation"],
    "sst2": ["accuracy"],
    "mrpc": ["accuracy", "f1"],
    "qqp": ["accuracy", "f1"],
    "stsb": ["pearson", "spearman"],
    "mnli": ["accuracy", "accuracy_mm"],
    "qnli": ["accuracy"],
    "rte": ["accuracy"],
    "wnli": ["accuracy"],
    "imdb": ["accuracy"],
}


@pytest.mark.parametrize("task", OFFICIAL)
def test_each_task_trains_evaluates_and_predicts(tmp_path, model, monkeypatch, task):
    asked = []

    def load_dataset(name, config_name=None, **options):
        asked.append((name, config_name))
        return glue_splits(task)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    script = run_glue_no_trainer if task in ("mnli", "stsb", "qnli") else run_glue
    argv = ["--task_name", task, "--do_train", "--do_eval", "--do_predict", "--max_steps", "1", "--report_to", "none"]
    results = script.main([*argv, "--model_name_or_path", str(model), "--output_dir", str(tmp_path / "out")])
    assert asked == [("stanfordnlp/imdb", None) if task == "imdb" else ("nyu-mll/glue", task)]
    assert all(np.isfinite(results[f"eval_{name}"]) for name in OFFICIAL[task])
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card_errors(card.content) == []
    assert card.data.datasets == ["stanfordnlp/imdb" if task == "imdb" else "nyu-mll/glue"]
    assert {name.removesuffix("_mm") for name in OFFICIAL[task]} <= set(card.data.metrics)
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config
    files = sorted(file.name for file in (tmp_path / "out").glob("predict_results*"))
    expected = {"mnli": ["predict_results_mnli.txt", "predict_results_mnli_mm.txt"]}
    assert files == expected.get(task, [f"predict_results_{task}.txt"])
    found = predictions(tmp_path / "out" / files[0])
    if task == "stsb":
        assert config.num_labels == 1
        assert all(float(value) is not None for value in found)
    else:
        assert set(found) <= set(config.label2id)
        assert list(config.id2label.values()) == glue_splits(task)["train"].features["label"].names


def test_mnli_with_the_trainer_has_both_figures(tmp_path, model, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: glue_splits("mnli"))
    argv = ["--task_name", "mnli", "--do_train", "--do_eval", "--max_steps", "1", "--report_to", "none"]
    results = run_glue.main([*argv, "--model_name_or_path", str(model), "--output_dir", str(tmp_path / "out")])
    assert {"eval_accuracy", "eval_accuracy_mm", "eval_loss", "eval_loss_mm"} <= set(results)


def test_a_model_without_label_names_is_evaluated_on_a_task_with_them(tmp_path, model, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: glue_splits("sst2"))
    argv = ["--task_name", "sst2", "--do_eval", "--model_name_or_path", str(model), "--report_to", "none"]
    assert "eval_accuracy" in run_glue.main([*argv, "--output_dir", str(tmp_path / "out")])


def test_a_task_with_local_files(tmp_path, flags):
    rows = [["opera", "poem", "same"], ["opera", "atom", "other"]] * 8
    file = write_csv(tmp_path / "pairs.csv", ["sentence1", "sentence2", "label"], rows)
    argv = ["--task_name", "mrpc", "--train_file", file, "--validation_file", file]
    results = run_glue.main(flags(*argv, "--do_train", "--do_eval", "--max_steps", "2"))
    assert {"eval_accuracy", "eval_f1"} <= set(results)


@pytest.mark.parametrize("task", [*OFFICIAL, "classification", "regression"])
def test_metrics(task):
    metric = evaluate.load(str(EXAMPLES / "glue_metrics.py"), task, keep_in_memory=True)
    if task in ("stsb", "regression"):
        figures = metric.compute(predictions=[0.5, 2.0, 3.0, 8.0], references=[0.0, 1.0, 2.0, 3.0])
        assert figures == pytest.approx({"pearson": 11.75 / 158.4375**0.5, "spearman": 1.0})
        return
    figures = metric.compute(predictions=[1, 1, 0, 0, 1], references=[1, 0, 0, 0, 1])
    values = {"accuracy": 0.8, "f1": 0.8, "macro_f1": 0.8, "matthews_correlation": 2 / 3, "accuracy_mm": 0.8}
    names = {"classification": ["accuracy", "macro_f1"]}.get(task, OFFICIAL.get(task))
    assert figures == pytest.approx({name: values[name] for name in names if name != "accuracy_mm"})


def test_recipes_serve_both_scripts():
    for recipe in sorted((EXAMPLES / "recipes").glob("*.json")):
        for arguments in (training.TrainingArguments, training.AccelerateArguments):
            parsed = training.parse_arguments(
                glue_data.ModelArguments, glue_data.DataArguments, arguments, argv=[str(recipe), "--bf16", "false"]
            )
            assert parsed[2].do_train


# --- Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_long_examples_are_truncated_counted_and_reported(tmp_path, flags, script, caplog):
    rows = [["opera", "arts"], ["opera " * 30, "arts"], ["atom " * 30, "science"]]
    file = write_csv(tmp_path / "long.csv", ["text", "label"], rows)
    argv = ["--train_file", file, "--validation_file", file, "--do_train", "--do_eval", "--max_steps", "1"]
    results = SCRIPTS[script](flags(*argv))
    figures = [results[f"truncated_{name}examples"] for name in ("", "train_", "validation_")]
    assert figures == [4, 2, 2]
    assert "2 of 3 train examples have more than 24 tokens" in caplog.text
    with pytest.raises(ValueError, match="--max_seq_length 25 is more than the 24 tokens"):
        SCRIPTS[script](flags(*argv, "--max_seq_length", "25", folder="other"))
    results = SCRIPTS[script](flags(*argv, "--max_seq_length", "2", folder="short"))
    assert results["truncated_examples"] == 6


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([["opera", ["arts"]]], [], r"Row 0 of the train data has \['arts'\] in 'label'"),
        ([["opera", "arts"]] * 2, [], r"All train data have the label 'arts' in 'label': add examples"),
        ([["opera", {"a": 1}]], [], r"Row 0 of the train data has \{'a': 1\} in 'label'"),
        ([["opera", "arts"], ["poem", 1]], [], r"'arts' in row 0 but 1 in row 1: write all as texts"),
        (
            [[12, "arts"], [13, "sport"]],
            [],
            r"text column 'text' of the train data holds int64, as 12 in row 0: .*--text_column_names",
        ),
        (
            [[["opera"], "arts"], [["goal"], "sport"]],
            [],
            r"text column 'text' of the train data holds List, as \['opera'\]",
        ),
        (
            [["opera", "1"], ["poem", "arts"]],
            ["--do_regression"],
            r"Row 1 .* 'arts' in 'label', and a regression needs .* --do_regression false",
        ),
        ([["opera", 1.5], ["poem", float("inf")]], [], r"Row 1 .* inf in 'label', and a regression needs a finite"),
        ([["opera", "arts"], ["poem", None]], [], r"Row 1 .* the words None, NA, nan and null also count as no value"),
    ],
)
def test_labels_and_texts_that_cannot_be_learned_are_named(tmp_path, flags, rows, more, message):
    file = tmp_path / "train.json"
    file.write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in rows))
    with pytest.raises(ValueError, match=message):
        run_glue.main(flags("--do_train", "--train_file", str(file), *more))
    assert not (tmp_path / "out").exists()


def test_a_label_that_csv_reads_as_missing_is_explained(tmp_path, flags):
    file = write_csv(tmp_path / "train.csv", ["text", "label"], [["opera", "arts"], ["poem", "None"]])
    with pytest.raises(ValueError, match=r"Row 1 .* no value in 'label'.* use other words, or a json file"):
        run_glue.main(flags("--do_train", "--train_file", file))


def bert_tokenizer(folder, words):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    tokenizer = transformers.BertTokenizer(vocab={name: index for index, name in enumerate(names)})
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_tokenizer_with_more_tokens_and_token_types_than_the_model(tmp_path, flags, script, caplog):
    many = bert_tokenizer(tmp_path / "tokenizer", [*(f"w{index}" for index in range(200)), "opera", "atom"])
    file = write_csv(
        tmp_path / "pairs.csv", ["sentence1", "sentence2", "label"], [["opera", "atom", "x"], ["atom", "atom", "y"]]
    )
    argv = ["--train_file", file, "--validation_file", file, "--tokenizer_name", many]
    results = SCRIPTS[script](flags(*argv, "--do_train", "--do_eval", "--max_steps", "1"))
    assert np.isfinite(results["eval_loss"])
    assert "The tokenizer has 207 tokens" in caplog.text
    assert "token_type_ids of the tokenizer are left out" in caplog.text
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.vocab_size == 207


def test_models_and_tokenizers_that_do_not_fit_are_refused(tmp_path, model, flags):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "unpadded")
    with pytest.raises(ValueError, match="unpadded has no padding token"):
        run_glue.main(flags("--do_train", "--tokenizer_name", str(tmp_path / "unpadded")))
    for more in ([], ["--do_regression"]):
        with pytest.raises(ValueError, match=r"--do_predict .* random labels.* with --do_train"):
            run_glue.main(flags("--do_predict", *more))
    run_glue.main(flags("--do_train", "--max_steps", "1", folder="tuned"))
    tuned = ["--model_name_or_path", str(tmp_path / "tuned")]
    file = write_csv(tmp_path / "two.csv", ["text", "label"], [["opera", "x"], ["atom", "y"]])
    argv = ["--do_train", "--max_steps", "1", "--train_file", file]
    with pytest.raises(ValueError, match=r"2 labels of these data: .*--ignore_mismatched_sizes"):
        run_glue.main(flags(*argv, *tuned))
    run_glue.main(flags(*argv, *tuned, "--ignore_mismatched_sizes"))
    many = bert_tokenizer(tmp_path / "many", [f"w{index}" for index in range(200)])
    with pytest.raises(ValueError, match=r"has 205 tokens, and .* --tokenizer_name it was trained with"):
        run_glue.main(flags("--do_predict", *tuned, "--tokenizer_name", many, folder="other"))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        (["text", "topic"], [["opera", "arts"]], r"validation data have no column 'label' but text, topic"),
        (["text", "label"], [["opera", "arts"], ["tea", "cooking"]], r"not among the 3 known ones: cooking"),
        (["text", "label"], [["opera", "arts"], ["tea", ""]], r"Row 1 of the validation data has no value"),
        (["body", "label"], [["opera", "arts"]], None),
        (["title", "body", "author", "label"], [["a", "b", "c", "arts"]], r"--text_column_names"),
    ],
)
def test_mistakes_in_the_validation_data_show_before_training(tmp_path, flags, script, columns, rows, message):
    file = write_csv(tmp_path / "validation.csv", columns, rows)
    argv = flags("--do_train", "--do_eval", "--max_steps", "1", "--validation_file", file)
    if message is None:  # the only column with strings is taken
        assert SCRIPTS[script](argv)["eval_loss"] > 0
        return
    with pytest.raises(ValueError, match=message):
        SCRIPTS[script](argv)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--train_file", "missing.csv"], "--train_file missing.csv does not exist"),
        (["--task_name", "sst5"], "--task_name sst5 is unknown"),
        (["--text_column_names", "text,more"], "--text_column_names"),
        (["--label_column_name", "labels"], "--label_column_name"),
    ],
)
def test_mistakes_in_the_flags(flags, more, message):
    for main in SCRIPTS.values():
        with pytest.raises(ValueError, match=message):
            main(flags("--do_train", *more))


def test_what_is_missing_is_named(tmp_path, model, files):
    output = ["--do_train", "--do_eval", "--output_dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="--model_name_or_path"):
        run_glue.main(output)
    output += ["--model_name_or_path", str(model)]
    with pytest.raises(ValueError, match="--task_name, --dataset_name or --train_file"):
        run_glue.main(output)
    with pytest.raises(ValueError, match="no validation data: pass --validation_file"):
        run_glue.main([*output, "--train_file", files["train"]])


def test_a_model_that_knows_no_label_names_is_not_evaluated(flags):
    with pytest.raises(ValueError, match="--do_train"):
        run_glue.main(flags("--do_eval"))


def test_an_output_folder_in_use_is_refused(tmp_path, flags):
    for main in SCRIPTS.values():
        training.write_json(tmp_path / "out" / "all_results.json", {"kept": 1})
        with pytest.raises(ValueError, match="already holds a run"):
            main(flags("--do_train"))
        assert json.loads((tmp_path / "out" / "all_results.json").read_text()) == {"kept": 1}
