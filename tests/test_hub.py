"""All roads through the Hub, against the server of hubserver.py.

huggingface_hub reads its settings when it is imported, and conftest.py has put it offline by then. So what talks to
the server runs in processes of its own: one with this package pushes, two without it load, the second of them with
what the first has cached. Each step of theirs is a test here.
"""

import http.client
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import datasets
import huggingface_hub
import pytest
import torch
import transformers
from conftest import HEADS, build, mask_of, random_ids
from hubserver import Hub, card_errors

import linformer_hf
import linformer_hf.training


pytestmark = pytest.mark.xdist_group("hub")  # the processes are started once, not by each worker

NAMES = {head: auto for auto, head in HEADS.items()} | {"windowed": "AutoModelForMaskedLM"}
SENTENCES = ["The river rises in the mountains.", "It flows through the city to the sea.", "A bird sings of water."]
LABELS = ["contradiction", "neutral", "entailment"]  # those that zero-shot classification looks for
LONG = "the sea " * 50


# ---- the steps, as they run in other processes, in a folder with `models`, `tokenizer` and `inputs.pt`


def outputs_of(model):
    """What the model gives for the inputs, and what its encoder does."""
    ids, mask = torch.load("inputs.pt")
    with torch.no_grad():
        states = model.eval().base_model(ids, mask)[0]
        if "MultipleChoice" in type(model).__name__:
            ids, mask = ids[:, None], mask[:, None]
        return {"outputs": model(ids, mask)[0], "states": states}


def remember(name, model, label="main", revision=None):
    """Notes what a model that is pushed gives: who loads it has to get the same bits, and may from `revision`."""
    torch.save({"revision": revision or label, **outputs_of(model)}, f"{name}@{label}.pt")


def saved(name, auto="AutoModelForMaskedLM", factor=1):
    """A saved model, in the class of this package; another `factor` makes another model."""
    model = getattr(transformers, auto).from_pretrained(f"models/{name}")
    assert type(model).__module__ == "linformer_hf.modeling_linformer", type(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def tokenizer():
    return transformers.AutoTokenizer.from_pretrained("tokenizer")


def push(name, auto):
    model = saved(name, auto)
    remember(name, model)
    model.push_to_hub(name)  # in the user's own namespace
    tokenizer().push_to_hub(f"tester/{name}")


def push_in_shards():
    model = saved("LinformerForMaskedLM")
    remember("sharded", model)
    model.push_to_hub("tester/sharded", max_shard_size="20KB")
    files = huggingface_hub.list_repo_files("tester/sharded")
    assert sum(file.endswith(".safetensors") for file in files) > 2, files
    assert "model.safetensors.index.json" in files


def push_in_private():
    model = saved("LinformerForMaskedLM", factor=2)
    remember("private", model)
    model.push_to_hub("tester/private", private=True)
    tokenizer().push_to_hub("tester/private")
    assert huggingface_hub.model_info("tester/private").private


def push_revisions():
    first, second, third = (saved("LinformerForMaskedLM", factor=factor) for factor in (1, 2, 3))
    commit = first.push_to_hub("tester/revisions").oid
    huggingface_hub.create_tag("tester/revisions", tag="v1")
    second.push_to_hub("tester/revisions")
    third.push_to_hub("tester/revisions", revision="next")
    remember("revisions", first, "hash", commit)
    for label, model in (("v1", first), ("main", second), ("next", third)):
        remember("revisions", model, label)
    outputs = [torch.load(f"revisions@{label}.pt")["outputs"] for label in ("v1", "main", "next")]
    assert not torch.equal(outputs[0], outputs[1]), "the versions are the same"
    assert not torch.equal(outputs[1], outputs[2]), "the versions are the same"


def push_from_a_trainer_of(package):
    """Trains for two steps, and pushes after the first and at the end."""
    module = {"transformers": transformers, "linformer_hf": linformer_hf.training}[package]
    name = f"trained-by-{package}"
    arguments = {"max_steps": 2, "save_steps": 1, "use_cpu": True, "report_to": "none"}
    trainer = module.Trainer(
        model=saved("LinformerForMaskedLM"),
        args=module.TrainingArguments(f"runs/{name}", push_to_hub=True, hub_model_id=f"tester/{name}", **arguments),
        train_dataset=[{"input_ids": row, "labels": row} for row in torch.load("inputs.pt")[0]],
        processing_class=tokenizer(),
    )
    before = outputs_of(trainer.model)["outputs"]
    trainer.train()
    remember(name, trainer.model)
    assert not torch.equal(outputs_of(trainer.model)["outputs"], before), "nothing was learned"
    if package == "linformer_hf":
        trainer.finish({"train_loss": 1.0}, tasks="fill-mask", dataset="rivers")
    else:
        trainer.push_to_hub(tasks="fill-mask", dataset="rivers")
    assert "rivers" in huggingface_hub.ModelCard.load(f"tester/{name}").text


def push_from_accelerate():
    """The loop of the scripts without a Trainer pushes at its end."""
    training = linformer_hf.training
    arguments = {"max_steps": 2, "do_train": True, "save_strategy": "no", "report_to": "none"}
    args = training.AccelerateArguments(
        "runs/accelerated", push_to_hub=True, hub_model_id="tester/accelerated", **arguments
    )
    run = training.AccelerateRun(args, saved("LinformerForMaskedLM"), tokenizer())
    rows = datasets.Dataset.from_list(
        [{"input_ids": row, "labels": row} for row in torch.load("inputs.pt")[0].tolist()]
    )
    run.train(rows, transformers.default_data_collator)
    remember("accelerated", run.accelerator.unwrap_model(run.model))
    run.finish({"train_loss": 1.0}, dataset="rivers")
    assert "rivers" in huggingface_hub.ModelCard.load("tester/accelerated").text


def cut_off(*requests):
    """The server breaks the connection in the middle of the next requests that begin so."""
    url = f"{os.environ['HF_ENDPOINT']}/_drops"
    huggingface_hub.utils.get_session().put(url, json=requests).raise_for_status()


def push_broken_off(name, request, times, factor):
    """A push whose connection breaks leaves the last commit in place, and can be repeated."""
    repository = f"tester/{name}"
    old, new = saved("LinformerForMaskedLM"), saved("LinformerForMaskedLM", factor=factor)
    commit = old.push_to_hub(repository).oid
    remember(name, old, "hash", commit)
    remember(name, new)
    cut_off(*[request] * times)
    # huggingface_hub waits longer and longer before it tries again
    with patch("time.sleep"), pytest.raises(Exception, match=r"uploading|disconnected|reset|pipe") as caught:
        new.push_to_hub(repository)
    error = caught.value.__cause__ if type(caught.value) is RuntimeError else caught.value
    assert "TransportError" in [base.__name__ for base in type(error).__mro__], repr(error)
    assert huggingface_hub.model_info(repository).sha == commit, "a broken push has left a commit"
    pushed = new.push_to_hub(repository).oid
    assert huggingface_hub.model_info(repository).sha == pushed != commit


def push_broken_off_once():
    """huggingface_hub itself repeats what broke off while a file was sent."""
    model = saved("LinformerForMaskedLM", factor=6)
    remember("broken-once", model)
    cut_off("PUT /_large/")
    with patch("time.sleep") as sleep:
        model.push_to_hub("tester/broken-once")
    assert sleep.call_count == 1, "nothing broke off"


def push_with_a_wrong_token():
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="Invalid credentials"):
        saved("LinformerForMaskedLM").push_to_hub("tester/stolen", token="hf_wrong")


def push_with_a_broken_card():
    card = b"---\nlicense: [apache-2.0]\n---\n"
    with pytest.raises(ValueError, match="license is not a string"):
        huggingface_hub.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id="tester/sharded")


def load(name, auto="AutoModelForMaskedLM", label="main", **options):
    """Loads it twice, and its encoder alone."""
    expected = torch.load(f"{name}@{label}.pt")
    options |= {"revision": expected["revision"], "trust_remote_code": True}
    for auto_class in (auto, auto, "AutoModel"):
        model = getattr(transformers, auto_class).from_pretrained(f"tester/{name}", **options)
        assert "transformers_modules" in type(model).__module__, type(model)
        outputs = outputs_of(model)
        if auto_class == auto:
            assert torch.equal(outputs["outputs"], expected["outputs"]), "other outputs than before the push"
        assert torch.equal(outputs["states"], expected["states"]), "other hidden states than before the push"


def load_by_every_auto_class(name):
    for auto, head in HEADS.items():
        model = getattr(transformers, auto).from_pretrained(f"tester/{name}", trust_remote_code=True)
        assert type(model).__name__ == head, (auto, type(model))
    config = transformers.AutoConfig.from_pretrained(f"tester/{name}", trust_remote_code=True)
    assert config.projected_length == 7
    loaded = transformers.AutoTokenizer.from_pretrained(f"tester/{name}")
    assert loaded(LONG) == tokenizer()(LONG)
    assert loaded.model_max_length == 61


def load_in_private():
    """With the token given by hand, and nothing cached."""
    token = Path("token").read_text()
    load("private", token=token, cache_dir="private")
    loaded = transformers.AutoTokenizer.from_pretrained("tester/private", token=token, cache_dir="private")
    assert loaded(LONG) == tokenizer()(LONG)


def push_what_was_loaded():
    """A model whose code came from the Hub goes back there with it."""
    model = transformers.AutoModelForMaskedLM.from_pretrained("tester/windowed", trust_remote_code=True)
    remember("again", model)
    model.push_to_hub("tester/again")


def refuse(name, token, revision, cause, message):
    """`from_pretrained` raises an OSError around huggingface_hub's own error, which the API raises."""
    cause = getattr(huggingface_hub.errors, cause)
    options = {"token": token, "revision": revision}
    with pytest.raises(OSError, match=message) as caught:
        transformers.AutoModel.from_pretrained(f"tester/{name}", trust_remote_code=True, cache_dir="empty", **options)
    assert type(caught.value.__cause__) is cause, repr(caught.value.__cause__)
    with pytest.raises(cause):
        huggingface_hub.model_info(f"tester/{name}", **options)
    with pytest.raises(cause):
        huggingface_hub.hf_hub_download(f"tester/{name}", "config.json", cache_dir="empty", **options)


def pipe(task, name):
    made = transformers.pipeline(task, f"tester/{name}", trust_remote_code=True)
    assert "transformers_modules" in type(made.model).__module__, type(made.model)
    assert made.tokenizer.model_max_length == made.model.config.max_position_embeddings == 61
    return made


def by_hand(made, *texts, truncation=True):
    """What the model of the pipeline gives for one text or pair, cut to the longest input."""
    with torch.no_grad():
        return made.model(**made.tokenizer(*texts, truncation=truncation, max_length=61, return_tensors="pt"))[0]


def close(first, second):
    first = torch.as_tensor(first)
    return first.shape == second.shape and torch.allclose(first, second, atol=1e-5, rtol=0)


def assert_too_long(made, text):
    """Where the pipeline does not cut a text, the model says how long it is and how long it may be."""
    tokens = len(made.tokenizer(text).input_ids)
    with pytest.raises(ValueError, match=f"has {tokens} tokens.*`max_position_embeddings` = 61"):
        made(text)


def fill_masks():
    made = pipe("fill-mask", "LinformerForMaskedLM")
    for text, options in (("a [MASK] sings", {}), ("[MASK] " + LONG, {"truncation": True})):
        place = made.tokenizer(text).input_ids.index(made.tokenizer.mask_token_id)
        right = by_hand(made, text)[0, place].softmax(-1).topk(5)
        answers = made(text, tokenizer_kwargs=options)
        assert [answer["token"] for answer in answers] == right.indices.tolist()
        assert close([answer["score"] for answer in answers], right.values)
    assert_too_long(made, text)


def classify_texts():
    made = pipe("text-classification", "LinformerForSequenceClassification")
    texts = ["a bird sings", LONG]
    answers = made(texts, truncation=True, batch_size=2, top_k=None)
    for text, scores in zip(texts, answers, strict=True):
        right = by_hand(made, text)[0].softmax(-1)
        labels = made.model.config.label2id
        assert close([score["score"] for score in scores], right[[labels[score["label"]] for score in scores]])
    assert_too_long(made, texts[1])


def classify_tokens():
    """This pipeline cuts a text; with a stride it takes it in pieces."""
    made = pipe("token-classification", "LinformerForTokenClassification")
    for text, tokens in (("a bird sings", 3), (LONG, 59)):
        answers = made(text)
        right = by_hand(made, text)[0, 1:-1].softmax(-1).max(-1)
        assert len(answers) == len(right.values) == tokens
        assert [answer["entity"] for answer in answers] == [f"LABEL_{index}" for index in right.indices]
        assert close([answer["score"] for answer in answers], right.values)
    whole = made(text, stride=10, aggregation_strategy="simple")
    assert answers[-1]["end"] < whole[-1]["end"] == len(text.strip())


def extract_features():
    made = pipe("feature-extraction", "LinformerModel")
    for text, options in (("a bird sings", {}), (LONG, {"truncation": True})):
        assert close(made(text, **options), by_hand(made, text))
    assert_too_long(made, text)


def classify_without_training():
    """This pipeline cuts a text, and leaves what is asked of it whole."""
    made = pipe("zero-shot-classification", "LinformerForSequenceClassification")
    for text in ("a bird sings", LONG):
        answer = made(text, candidate_labels=["water", "city", "bird"])
        pairs = [(text, f"This example is {label}.") for label in answer["labels"]]
        right = torch.cat([by_hand(made, *pair, truncation="only_first")[:, 2] for pair in pairs]).softmax(0)
        assert close(answer["scores"], right)
        assert answer["scores"] == sorted(answer["scores"], reverse=True)


# ---- which process takes which steps


PUSHES = [
    *((push, *item) for item in NAMES.items()),
    (push_in_shards,),
    (push_in_private,),
    (push_revisions,),
    *((push_from_a_trainer_of, package) for package in ("transformers", "linformer_hf")),
    (push_from_accelerate,),
    (push_broken_off, "broken-file", "PUT /_large/", 6, 4),  # huggingface_hub tries six times
    (push_broken_off, "broken-commit", "POST /api/models/tester/broken-commit/commit", 1, 5),
    (push_broken_off_once,),
    (push_with_a_wrong_token,),
    (push_with_a_broken_card,),
]
REFUSED = [
    ("private", False, None, "RepositoryNotFoundError", "If this is a private repository"),
    ("private", "hf_wrong", None, "HfHubHTTPError", "Invalid credentials"),
    ("LinformerModel", "hf_wrong", None, "HfHubHTTPError", "Invalid credentials"),
    ("missing", None, None, "RepositoryNotFoundError", "is not a valid model identifier"),
    ("revisions", None, "v0", "RevisionNotFoundError", "v0 is not a valid git identifier"),
]
LOADS = [
    *((load, *item) for item in NAMES.items()),
    *((load, name) for name in ("accelerated", "sharded", "broken-file", "broken-commit", "broken-once")),
    *((load, f"trained-by-{package}") for package in ("transformers", "linformer_hf")),
    *((load, "revisions", "AutoModelForMaskedLM", label) for label in ("hash", "v1", "main", "next")),
    *((load, f"broken-{what}", "AutoModelForMaskedLM", "hash") for what in ("file", "commit")),
    *((load_by_every_auto_class, name) for name in ("LinformerModel", "windowed")),
    *((step,) for step in (fill_masks, classify_texts, classify_tokens, extract_features, classify_without_training)),
]
FIRST_LOADS = [*LOADS, (load, "private"), *((refuse, *case) for case in REFUSED), (push_what_was_loaded,)]
LATER_LOADS = [*LOADS, (load_in_private,), (load, "again")]

PROCESS = """
import json, os, sys, traceback
from pathlib import Path
from unittest.mock import patch

if sys.argv[1] == "without":
    sys.modules["linformer_hf"] = None  # every import of it fails
else:
    import datasets, linformer_hf.training
import huggingface_hub, pytest, torch, transformers

torch.set_num_threads(1)
HEADS, LONG = {heads}, {long!r}
# ----{functions}
report = {{}}
for name, (function, *arguments) in {steps}.items():
    try:
        globals()[function](*arguments)
    except BaseException:
        report[name] = traceback.format_exc()
    else:
        report[name] = "passed"
Path("report.json").write_text(json.dumps(report))
"""


def name_of(step):
    return "-".join([step[0].__name__, *map(str, step[1:])])


def run(hub, folder, steps, package, token=None):
    """What became of each step: "passed" or the traceback."""
    script = folder / f"{package}.py"
    functions = Path(__file__).read_text().split("\n# ----")[1]
    named = {name_of(step): [step[0].__name__, *step[1:]] for step in steps}
    script.write_text(PROCESS.format(heads=HEADS, long=LONG, functions=functions, steps=named))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / package), "HF_TOKEN": token or ""}
    environment |= {"HF_HUB_DISABLE_XET": "1"}  # the server has no such storage
    environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, script, package]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads((folder / "report.json").read_text())


# ---- what became of the steps


@pytest.fixture(scope="module")
def hub():
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, hub):
    folder = tmp_path_factory.mktemp("hub")
    words = transformers.BertTokenizer().train_new_from_iterator(SENTENCES, 100, show_progress=False)
    words.model_max_length = 61
    words.save_pretrained(folder / "tokenizer")
    numbers = {label: number for number, label in enumerate(LABELS)}
    special = {
        "LinformerForSequenceClassification": {"id2label": dict(enumerate(LABELS)), "label2id": numbers},
        "windowed": {"local_attention_window": 5, "num_global_tokens": 2},
    }
    for name in NAMES:
        head = "LinformerForMaskedLM" if name == "windowed" else name
        build(head, vocab_size=len(words), **special.get(name, {})).save_pretrained(folder / "models" / name)
    torch.save((random_ids(2, 61, vocab_size=len(words)), mask_of("holes", 2, 61)), folder / "inputs.pt")
    (folder / "token").write_text(hub.token)
    return folder


@pytest.fixture(scope="module")
def pushed(hub, folder):
    return run(hub, folder, PUSHES, "with", hub.token)


@pytest.fixture(scope="module")
def loaded(hub, folder, pushed):
    return run(hub, folder, FIRST_LOADS, "without", hub.token)


@pytest.fixture(scope="module")
def loaded_later(hub, folder, loaded):
    hub.requests.clear()
    report = run(hub, folder, LATER_LOADS, "without")
    fetched = [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]
    return {**report, "fetched": fetched}


@pytest.mark.parametrize("step", map(name_of, PUSHES))
def test_pushing(step, pushed):
    assert pushed[step] == "passed", pushed[step]


@pytest.mark.parametrize("step", map(name_of, FIRST_LOADS))
def test_in_a_process_without_the_package(step, loaded):
    assert loaded[step] == "passed", loaded[step]


@pytest.mark.parametrize("step", map(name_of, LATER_LOADS))
def test_in_another_process_with_the_cache_of_the_first(step, loaded_later):
    assert loaded_later[step] == "passed", loaded_later[step]


def test_what_is_cached_is_not_fetched_again(loaded_later):
    new = [request for request in loaded_later["fetched"] if "/private/" in request or "/again/" in request]
    assert new == loaded_later["fetched"] != []


# ---- the server is as strict as the Hub


def status(hub, request, token=None, **body):
    connection = http.client.HTTPConnection("127.0.0.1", hub.server_port)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request(*request.split(), json.dumps(body), headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


@pytest.mark.parametrize("place", ["api/models/{}", "api/models/{}/tree/main", "{}/resolve/main/.gitattributes"])
def test_a_private_repository_is_closed_and_a_public_one_open(place, hub):
    for name in ("public", "private"):
        status(hub, "POST /api/repos/create", hub.token, name=f"a-{name}-one", visibility=name)
    for token, expected in ((None, [200, 401]), ("hf_wrong", [401, 401]), (hub.token, [200, 200])):
        names = ("tester/a-public-one", "tester/a-private-one")
        assert [status(hub, f"GET /{place.format(name)}", token) for name in names] == expected, token


def test_writing_needs_the_token(hub):
    status(hub, "POST /api/repos/create", hub.token, name="mine")
    names, repository, files = set(hub.repositories), hub.repositories["tester/mine"], set(hub.large_files)
    api = [f"/api/models/tester/mine/{what}/main" for what in ("preupload", "commit", "branch", "tag")]
    for path in ("/api/repos/create", "/tester/mine.git/info/lfs/objects/batch", *api):
        for token in (None, "hf_wrong"):
            assert status(hub, f"POST {path}", token, name="other", tag="v1") == 401, path
    assert status(hub, "PUT /_large/guessed", hub.token) == 403
    assert set(hub.repositories) == names
    assert set(hub.large_files) == files
    assert len(repository.commits) == len(repository.branches) == 1
    assert repository.tags == {}


INDEX = "model-index: [{name: m, results: [{task: {type: t}, dataset: {type: d, name: d}, metrics: [{type: f}]}]}]"


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        ("license: apache-2.0\ntags: [a]\npipeline_tag: fill-mask", None),
        (INDEX.replace("{type: f}", "{type: f, value: 1}"), None),
        (INDEX, "model-index"),  # a metric without a value
        ("license: [apache-2.0]", "license"),
        ("tags: [1]", "tags"),
        ("pipeline_tag: fill-in", "pipeline_tag"),
        ("- a list", "not a mapping"),
        ("a: b: c", "not YAML"),
    ],
)
def test_cards_are_checked(metadata, error):
    errors = card_errors(f"---\n{metadata}\n---\n# Model\n")
    assert len(errors) == (error is not None)
    assert error is None or error in errors[0]
    assert card_errors("# Model") == ["there is no metadata"]


def test_pushes_during_a_training_carry_the_code(hub, pushed):
    commits = hub.repositories["tester/trained-by-linformer_hf"].commits.values()
    assert sum("config.json" in files for files in commits) > 1
    assert all("modeling_linformer.py" in files for files in commits if "config.json" in files)
