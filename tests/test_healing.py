import copy
import itertools
import math

import pytest
import torch
from conftest import SHARINGS, TOLERANCE, difference
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    BertTokenizer,
    DataCollatorForLanguageModeling,
    DistilBertConfig,
    DistilBertForMaskedLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
)

from linformer_hf import healing
from linformer_hf.convert_hf import convert_encoder
from linformer_hf.projections_linformer import MatrixProjection, pooling_matrix


WORDS = [chr(code) for code in range(97, 123)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LENGTH = 48
SIZES = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "initializer_range": 0.2,
}
BERT = BertConfig(**SIZES, max_position_embeddings=LENGTH)
ROBERTA = RobertaConfig(**SIZES, max_position_embeddings=LENGTH + 2, type_vocab_size=1, pad_token_id=1)
DISTILBERT = DistilBertConfig(
    vocab_size=31, dim=30, n_layers=2, n_heads=3, hidden_dim=40, max_position_embeddings=LENGTH, initializer_range=0.2
)


@pytest.fixture(scope="module")
def tokenizer():
    return BertTokenizer(vocab={word: place for place, word in enumerate(SPECIAL + WORDS)})


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """Words that follow one another in a random walk: something to learn."""
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    places = torch.randint(-2, 4, (40, 100), generator=generator).cumsum(1) % len(WORDS)
    path.write_text("\n\n".join(" ".join(WORDS[place] for place in row) for row in places.tolist()), "utf-8")
    return path


@pytest.fixture(scope="module")
def windows(tokenizer, text_file):
    return healing.calibration_windows(text_file, tokenizer, LENGTH)


def make(source_class=BertModel, config=BERT):
    torch.manual_seed(0)
    return source_class(config)


def without_window(source, **options):
    torch.manual_seed(1)
    return convert_encoder(source, **{"local_attention_window": 0, "projected_length": 12, **options})


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(before, model):
    after = model.state_dict()
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------


def test_windows_hold_the_text_in_order(tokenizer, text_file, windows):
    assert (windows[:, 0] == tokenizer.cls_token_id).all()
    assert (windows[:, -1] == tokenizer.sep_token_id).all()
    lines = text_file.read_text("utf-8").split("\n\n")
    expected = [token for line in lines for token in (*tokenizer(line)["input_ids"][1:-1], tokenizer.sep_token_id)]
    pieces = windows[:, 1:-1].flatten().tolist()
    assert pieces == expected[: len(pieces)]
    assert len(expected) - len(pieces) < LENGTH - 2


@pytest.mark.parametrize(("text", "length"), [("", 10), ("a b c d", 10), ("a b c d e f g", 2)])
def test_too_little_text_is_refused(tokenizer, tmp_path, text, length):
    (tmp_path / "text.txt").write_text(text)
    with pytest.raises(ValueError, match=f"do not fill two windows of {length}"):
        healing.calibration_windows(tmp_path / "text.txt", tokenizer, length)


def test_a_missing_text_is_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"no calibration file .*none\.txt"):
        healing.calibration_windows(tmp_path / "none.txt", tokenizer, 10)


# ---------------------------------------------------------------------------------------------------------------------
# Longer source
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source_class", "config"),
    [(BertForMaskedLM, BERT), (RobertaModel, ROBERTA), (DistilBertForMaskedLM, DISTILBERT)],
)
def test_a_longer_source_is_the_source_up_to_its_length_and_repeats_its_positions(source_class, config, windows):
    source = make(source_class, config).eval()
    before = weights(source)
    longer = healing.lengthen_source(source, 2 * LENGTH + 5)
    assert not longer.training
    assert longer.config._attn_implementation == "sdpa"
    ours, theirs = (model(windows[:2], output_hidden_states=True).hidden_states for model in (longer, source))
    for one, other in zip(ours, theirs, strict=True):
        assert difference(one, other) <= TOLERANCE["float32"]
    long_row = torch.cat([windows[:1], windows[:1], windows[:1, :5]], dim=1)
    embedded = longer(long_row, output_hidden_states=True).hidden_states[0]
    assert difference(embedded[:, LENGTH : 2 * LENGTH], embedded[:, :LENGTH]) <= TOLERANCE["float32"]
    assert difference(embedded[:, 2 * LENGTH :], embedded[:, :5]) <= TOLERANCE["float32"]
    assert changed(before, source) == set()
    assert healing.lengthen_source(source, LENGTH) is source


def test_a_longer_source_has_the_positions_of_a_longer_conversion():
    source = make(RobertaModel, ROBERTA)
    target = convert_encoder(source, max_position_embeddings=100)
    longer = healing.lengthen_source(source, 100)
    theirs = longer.embeddings.position_embeddings.weight[2:]
    assert difference(target.embeddings.position_embeddings.weight, theirs) == TOLERANCE["exact"]


# ---------------------------------------------------------------------------------------------------------------------
# Starts
# ---------------------------------------------------------------------------------------------------------------------


def energy_outside(matrix, gram):
    """Share of the attention matrices' squared norm that the rows of (k, n) do not span."""
    rest = torch.eye(gram.shape[-1], dtype=gram.dtype) - torch.linalg.pinv(matrix) @ matrix
    return ((rest @ gram @ rest).trace() / gram.trace()).item()


def matrices(model):
    return {name: m.weight.detach() for name, m in model.named_modules() if isinstance(m, MatrixProjection)}


@pytest.mark.parametrize("sharing", SHARINGS)
def test_pooling_and_random_starts(sharing):
    target = without_window(make(), projection_type="linear", projection_sharing=sharing)
    before = weights(target)
    healing.initialize_projections(target, "mean_pooling")
    pooling = pooling_matrix(12, LENGTH)
    found = matrices(target)
    assert all(difference(matrix, pooling.expand_as(matrix)) == TOLERANCE["exact"] for matrix in found.values())
    healing.initialize_projections(target, "random")
    assert len({matrix.sum().item() for matrix in found.values()}) == len(found)  # E is not F
    numbers = torch.cat([matrix.flatten() for matrix in found.values()])
    assert abs(numbers.std().item() * 12**0.5 - 1) < 4 / math.sqrt(2 * len(numbers))
    assert {name.rsplit(".", 1)[0] for name in changed(before, target)} == set(found)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("method", ["identity", "spectral"])
def test_k_equal_to_n_gives_the_source(sharing, method, windows):
    source = make().eval()
    target = without_window(source, projection_type="linear", projection_sharing=sharing, projected_length=LENGTH)
    healing.initialize_projections(target, method, source, windows[:2])
    ours, theirs = (model(windows[:2]).last_hidden_state for model in (target, source))
    assert difference(ours, theirs) <= TOLERANCE["whole_model"]


@pytest.mark.parametrize("sharing", SHARINGS)
def test_spectral_rows_are_orthogonal_and_span_the_most_of_the_attention(sharing, windows):
    source = make().train()
    before, implementation = weights(source), source.config._attn_implementation
    target = without_window(source, projection_type="linear", projection_sharing=sharing)
    healing.initialize_projections(target, "spectral", source, windows[:8])
    assert source.training
    assert source.config._attn_implementation == implementation
    assert changed(before, source) == set()

    eager = copy.deepcopy(source).eval()
    eager.set_attn_implementation("eager")
    attentions = eager(windows[:8], output_attentions=True).attentions  # 2 layers of (b, h, n, n)
    grams = torch.stack([torch.einsum("bhqn,bhqm->hnm", a, a) for a in attentions]).double()  # (2, h, n, n)
    pooling = pooling_matrix(12, LENGTH).double()
    for name, found in matrices(target).items():
        layer = slice(None) if "shared" in name else int(name.split("layer.")[1].split(".")[0])
        own = grams[layer] if sharing == "none" else grams[layer].flatten(0, -3).sum(0)[None]
        for matrix, gram in zip(found.double().view(-1, 12, LENGTH), own, strict=True):
            assert difference(matrix @ matrix.T, torch.eye(12).double() * 12 / LENGTH) <= TOLERANCE["float32"]
            smallest = torch.linalg.eigvalsh(gram)[: LENGTH - 12].sum() / gram.trace()  # of all k×n matrices
            outside = energy_outside(matrix, gram)
            assert abs(outside - smallest.item()) <= TOLERANCE["float32"]
            assert outside < 0.9 * energy_outside(pooling, gram)
            # of all matrices with that span, it is close to pooling: no row has the opposite sign or another place
            assert ((matrix * pooling).sum(1) > 0).all()


def test_impossible_starts_are_refused(windows):
    source = make()
    linear = without_window(source, projection_type="linear")
    with pytest.raises(ValueError, match="'mean_pooling', whose start cannot be chosen"):
        healing.initialize_projections(without_window(source), "random")
    with pytest.raises(ValueError, match="but they are 12, 48"):
        healing.initialize_projections(linear, "identity")
    with pytest.raises(ValueError, match=r"'pca' is no start.*spectral"):
        healing.initialize_projections(linear, "pca")
    for given in ((None, windows), (source, None), (source, windows[:, :20])):
        with pytest.raises(ValueError, match=r"'spectral' needs the source and windows of .* = 48"):
            healing.initialize_projections(linear, "spectral", *given)


# ---------------------------------------------------------------------------------------------------------------------
# Healing
# ---------------------------------------------------------------------------------------------------------------------


def heal(target, source, windows, tokenizer, steps=60, learning_rate=5e-4, **options):
    return healing.heal(target, source, windows, tokenizer, steps, learning_rate=learning_rate, **options)


@pytest.mark.parametrize(
    ("source_class", "config"),
    [
        (BertModel, BERT),
        (RobertaForSequenceClassification, ROBERTA),
        (DistilBertForMaskedLM, DISTILBERT),
        (BertForPreTraining, BERT),
    ],
)
def test_healing_brings_held_out_text_closer(source_class, config, windows, tokenizer):
    source = make(source_class, config).train()
    target = without_window(source, projection_type="linear").train()
    healing.initialize_projections(target, "random")
    source_before = weights(source)
    train, held_out = windows[:-10], windows[-10:]
    before = healing.agreement(target, source, held_out, tokenizer)
    losses = heal(target, source, train, tokenizer)
    after = healing.agreement(target, source, held_out, tokenizer)
    assert len(losses) == 60
    assert len(after["layer_errors"]) == 2
    for one, other in zip(after["layer_errors"], before["layer_errors"], strict=True):
        assert one < 0.55 * other
    assert changed(source_before, source) == set()
    assert source.training
    assert target.training
    has_words = source_class in (DistilBertForMaskedLM, BertForPreTraining)
    assert ("target_loss" in before) == has_words
    if has_words:
        assert after["source_loss"] == before["source_loss"]
        assert after["same_top1"] > 2 * before["same_top1"]


def test_pooling_without_weights_is_healed_too(windows, tokenizer):
    source = make()
    target = without_window(source)
    before = healing.agreement(target, source, windows[-10:], tokenizer)["layer_errors"]
    heal(target, source, windows[:-10], tokenizer)
    after = healing.agreement(target, source, windows[-10:], tokenizer)["layer_errors"]
    assert all(one < 0.8 * other for one, other in zip(after, before, strict=True))


def test_an_exact_conversion_agrees_and_stays_so(windows, tokenizer):
    source = make(BertForMaskedLM)
    target = without_window(source, projected_length=LENGTH)
    figures = healing.agreement(target, source, windows[:8], tokenizer)
    assert max(figures["layer_errors"]) <= TOLERANCE["float32"]
    assert figures["same_top1"] == 1
    assert figures["target_top1"] == figures["source_top1"]
    assert abs(figures["target_loss"] - figures["source_loss"]) <= TOLERANCE["float32"]


def test_figures_are_those_of_plain_calls(windows, tokenizer):
    source, held_out = make(BertForMaskedLM).eval(), windows[:6]
    target = without_window(source)
    figures = healing.agreement(target, source, held_out, tokenizer, batch_size=4, seed=5)
    collator = DataCollatorForLanguageModeling(tokenizer, seed=5)
    batches = [collator(list(rows)) for rows in held_out.split(4)]
    input_ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    ours, theirs = (model(input_ids, output_hidden_states=True) for model in (target, source))
    for found, one, other in zip(
        figures["layer_errors"], ours.hidden_states[1:], theirs.hidden_states[1:], strict=True
    ):
        assert found == pytest.approx(((one - other).norm() / other.norm()).item(), rel=1e-4)
    masked = labels != -100
    assert 0.05 < masked.float().mean() < 0.25
    guess, wanted = (outputs.logits[masked].argmax(-1) for outputs in (ours, theirs))
    loss = torch.nn.functional.cross_entropy(ours.logits[masked], labels[masked])
    assert figures["target_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert figures["target_top1"] == pytest.approx((guess == labels[masked]).float().mean().item())
    assert figures["source_top1"] == pytest.approx((wanted == labels[masked]).float().mean().item())
    assert figures["same_top1"] == pytest.approx((guess == wanted).float().mean().item())


@pytest.mark.parametrize("sharing", SHARINGS)
def test_projections_are_trained_first_and_alone(sharing, windows, tokenizer, monkeypatch):
    source = make()
    target = without_window(source, projection_type="linear", projection_sharing=sharing)
    phases = healing._phases
    monkeypatch.setattr(healing, "_phases", lambda *args: itertools.islice(phases(*args), 1))
    before = weights(target)
    assert len(heal(target, source, windows, tokenizer, steps=10)) == 2
    assert changed(before, target) == {f"{name}.weight" for name in matrices(target)}
    assert all(parameter.requires_grad for parameter in target.parameters())


@pytest.mark.parametrize("options", [{"freeze_projections": True, "projection_type": "linear"}, {}])
def test_without_projections_to_train_all_steps_are_for_the_rest(options, windows, tokenizer):
    source = make()
    target = without_window(source, **options)
    before = weights(target)
    heal(target, source, windows, tokenizer, steps=3)
    left = {name for name in before if "_projection" in name}
    assert changed(before, target).isdisjoint(left)
    assert {name for name in before if "encoder.layer" in name} - left <= changed(before, target)


@pytest.mark.parametrize(
    ("window", "expected"), [(0, [(20, True), (40, True), (40, False)]), (8, [(20, True), (80, False)])]
)
def test_layers_are_trained_alone_first_but_with_a_window(window, expected):
    target = without_window(make(), projection_type="linear", local_attention_window=window)
    phases = list(healing._phases(target, 100))
    assert [(steps, alone) for _, steps, _, alone in phases] == expected
    assert len(phases[0][0]) == 1
    assert len(phases[-1][0]) == len(list(target.parameters()))


def test_the_mean_over_tokens_counts_in_the_loss():
    theirs = torch.randn(4, 50, 6)
    shifted, noise = theirs + 0.1, theirs + 0.1 * torch.randn(4, 50, 6).sign()
    (systematic, random), (plain, other) = (
        [healing._Outputs([(ours, theirs)], None).loss(pooled).item() for ours in (shifted, noise)]
        for pooled in (True, False)
    )
    assert plain == pytest.approx(other, rel=1e-3)
    assert systematic - plain > 10 * (random - other) > 0
    assert healing._Outputs([(shifted[:1], theirs[:1])], None).loss(True).isfinite()


def test_some_batches_are_shorter(windows, tokenizer, monkeypatch):
    seen, compare = [], healing._compare
    monkeypatch.setattr(healing, "_compare", lambda *args: (seen.append(args[2]), compare(*args))[1])
    source = make(BertForMaskedLM)
    heal(without_window(source), source, windows, tokenizer)
    lengths = [batch["input_ids"].shape[1] for batch in seen]
    shorter = [length for length in lengths if length < LENGTH]
    assert 0.15 < len(shorter) / len(lengths) < 0.55
    assert min(shorter) >= LENGTH / 8
    assert len(set(shorter)) > len(shorter) / 2
    for batch in seen:
        right = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
        assert (right[:, -1] == tokenizer.sep_token_id).all()
        starts = [row[:-1].tolist() for row in right]
        assert all(any(window[: len(start)].tolist() == start for window in windows) for start in starts)


def test_a_batch_without_masked_tokens_has_a_finite_loss(windows, tokenizer):
    source = make(BertForMaskedLM)
    batch = {"input_ids": windows[:2], "labels": torch.full_like(windows[:2], -100)}
    with torch.no_grad():
        assert healing._compare(without_window(source), source, batch).loss(pooled=True).isfinite()


def test_each_layer_learns_from_the_source_alone(windows, tokenizer):
    source = make().eval()
    target = without_window(source).eval()
    batch = next(iter(healing._batches(target, source, windows, tokenizer, 4, 0)))

    def errors(alone):
        ours, theirs = healing._compare(target, source, batch, alone).squared_errors()
        return (ours / theirs).detach()

    together, alone = errors(False), errors(True)
    assert difference(together[:1], alone[:1]) <= TOLERANCE["float32"]  # the first layer's input is the same
    torch.nn.init.normal_(target.encoder.layer[0].output.dense.weight)
    assert errors(False)[1] > 1.5 * together[1]
    assert errors(True)[1] == alone[1]
    assert not any(layer._forward_pre_hooks for layer in target.encoder.layer)


def test_the_same_seed_gives_the_same_model(windows, tokenizer):
    source = make(BertForMaskedLM)
    models = []
    for global_seed, seed in ((0, 3), (1, 3), (0, 4)):
        target = without_window(source)
        torch.manual_seed(global_seed)
        heal(target, source, windows, tokenizer, steps=4, seed=seed)
        models.append(weights(target))
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert not all(torch.equal(models[0][name], models[2][name]) for name in models[0])


def test_healing_in_bfloat16_keeps_float32_weights(windows, tokenizer):
    source = make(BertForMaskedLM)
    target = without_window(source)
    losses = heal(target, source, windows, tokenizer, steps=3, bf16=True)
    assert all(math.isfinite(loss) for loss in losses)
    assert {parameter.dtype for parameter in target.parameters()} == {torch.float32}


def test_a_longer_conversion_is_healed_against_the_longer_source(tokenizer, text_file):
    source = make(RobertaModel, ROBERTA)
    target = convert_encoder(
        source, max_position_embeddings=96, projected_length=12, local_attention_window=8, num_global_tokens=1
    )
    windows = healing.calibration_windows(text_file, tokenizer, 96)
    with pytest.raises(
        ValueError, match=r"have 96 tokens, but the target takes 96 and the source 48.*lengthen_source"
    ):
        heal(target, source, windows, tokenizer, steps=1)
    longer = healing.lengthen_source(source, 96)
    before = healing.agreement(target, longer, windows[-8:], tokenizer)["layer_errors"]
    heal(target, longer, windows[:-8], tokenizer, learning_rate=1e-3)
    after = healing.agreement(target, longer, windows[-8:], tokenizer)["layer_errors"]
    assert after[-1] < 0.9 * before[-1]


def test_impossible_healing_is_refused(windows, tokenizer):
    source = make()
    with pytest.raises(ValueError, match="`steps` is 0"):
        heal(without_window(source), source, windows, tokenizer, steps=0)
    with pytest.raises(ValueError, match=r"torch\.bfloat16, too coarse"):
        heal(without_window(source).bfloat16(), source, windows, tokenizer, steps=1)


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def test_calibrate_does_what_the_arguments_say(tokenizer, text_file, caplog):
    source = make(BertForMaskedLM)
    target = convert_encoder(
        source, projection_type="linear", projected_length=12, local_attention_window=0, max_position_embeddings=64
    )
    args = healing.HealingArguments(
        projection_init="spectral", calibration_file=str(text_file), calibration_steps=60, learning_rate=1e-4
    )
    with caplog.at_level("INFO", logger="linformer_hf"):
        figures = healing.calibrate(target, source, tokenizer, args)
    assert list(figures) == ["before", "after"]
    assert max(figures["after"]["layer_errors"]) < max(figures["before"]["layer_errors"])
    table = caplog.messages[-1].splitlines()
    assert table[0].split() == ["before", "after"]
    assert len(table) == 1 + 5 + 2
    last = f"{figures['before']['layer_errors'][1]:.4f} {figures['after']['layer_errors'][1]:.4f}"
    assert " ".join(table[-1].split()) == f"relative error of layer 2 {last}"


def test_held_out_windows_are_not_learned(tokenizer, text_file, windows, monkeypatch):
    seen = {}
    monkeypatch.setattr(healing, "heal", lambda target, source, given, *args: seen.update(train=given))
    monkeypatch.setattr(
        healing, "agreement", lambda target, source, given, *args: seen.update(test=given) or {"layer_errors": []}
    )
    source = make()
    args = healing.HealingArguments(calibration_file=str(text_file), calibration_steps=1)
    healing.calibrate(without_window(source), source, tokenizer, args)
    assert torch.equal(torch.cat([seen["train"], seen["test"]]), windows)
    assert len(seen["test"]) == -(-len(windows) // 10)


def test_calibrate_without_text_only_starts_projections(tokenizer):
    source = make()
    target = without_window(source, projection_type="linear")
    args = healing.HealingArguments(projection_init="mean_pooling")
    assert healing.calibrate(target, source, tokenizer, args) == {}
    assert difference(target.encoder.shared_projection.weight, pooling_matrix(12, LENGTH)) == TOLERANCE["exact"]


@pytest.mark.parametrize("flags", [{"calibration_steps": 5}, {"projection_init": "spectral"}])
def test_arguments_that_need_text_are_refused_without(flags):
    with pytest.raises(ValueError, match="give --calibration_file"):
        healing.HealingArguments(**flags)
