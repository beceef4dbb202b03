"""What is said of blended answers, against log probabilities of dense passes, and the command that says it."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_folder
from blend_cases import CHUNK, MODEL, ids, segment, substituted, weights
from tiny_tokenizers import CORPUS

from jaxkv import blend_check, blend_quality
from jaxkv.blend import Layout, Piece
from jaxkv.blend_quality import Judge, Way

PASSAGES = [ids(23, 1), ids(31, 2), ids(18, 3)]
CONTINUATION = ids(9, 4)
BOS = 90


def judge(bos=BOS, behind_bos=False):
    return Judge(weights(), MODEL, most=96, bos=bos, behind_bos=behind_bos, chunk=CHUNK)


def log_probabilities(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def expected_score(way, bos, behind_bos):
    """Return KL and top-1 over the continuation, by dense passes, for a way that has nothing to choose by deviation."""
    head = [] if bos is None else [bos]
    before = head if behind_bos else []
    exact = behind_bos or bos is None
    made = [Piece(head), *(Piece(p, cached=True, exact=exact and i == 0) for i, p in enumerate(PASSAGES))]
    layout = Layout.of(made, CONTINUATION)
    kvs = [segment(passage, before=before) for passage in PASSAGES]
    fresh = [*range(len(head)), *range(layout.size - CONTINUATION.size, layout.size)]
    firsts = [begin for begin, _ in layout.spans[1 if exact else 0 :]]
    chosen = fresh + (firsts if way.chooser == "first" else [])
    own = log_probabilities(substituted(layout, kvs, sorted(chosen)))[-CONTINUATION.size : -1]
    full = log_probabilities(substituted(layout, kvs, range(layout.size)))[-CONTINUATION.size : -1]
    kl = (np.exp(full) * (full - own)).sum(-1).mean()
    return kl, (own.argmax(-1) == full.argmax(-1)).mean(), len(chosen) - len(fresh)


@pytest.mark.parametrize("chooser", ["deviation", "first"])
@pytest.mark.parametrize(("bos", "behind_bos"), [(BOS, False), (BOS, True), (None, False)])
def test_scores_are_those_of_dense_passes(chooser, bos, behind_bos):
    made, way = judge(bos, behind_bos), Way(0, chooser)
    score = made.score(PASSAGES, CONTINUATION, made.full(PASSAGES, CONTINUATION), way)
    kl, top1, recomputed = expected_score(way, bos, behind_bos)
    assert kl > 0.01
    np.testing.assert_allclose(score.kl, kl, rtol=1e-3)
    assert (score.top1, score.recomputed) == (pytest.approx(top1), recomputed)
    assert score.eligible == 72 - (23 if behind_bos or bos is None else 0)


def test_full_recomputing_has_no_divergence_and_keys_that_are_not_rotated_have_more():
    made = judge()
    full = made.full(PASSAGES, CONTINUATION)
    by = {way: made.score(PASSAGES, CONTINUATION, full, way) for way in (Way(1), Way(0), Way(0, rotated=False))}
    assert abs(by[Way(1)].kl) < 1e-6 and by[Way(1)].top1 == 1
    assert by[Way(0)].kl > 0.01
    assert abs(by[Way(0, rotated=False)].kl - by[Way(0)].kl) > 1e-3


def test_keys_that_are_not_rotated_stand_as_they_did_in_their_passage():
    made = judge()
    k, _ = segment(PASSAGES[1])
    back = made._unturned(k, begin=24)
    half = MODEL.head_dim // 2
    omega = MODEL.rope.theta ** (-np.arange(half) / half)

    def turned(x, positions):
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[:, None, None] * omega)
        return np.concatenate([z.real, z.imag], -1)

    places = np.arange(31)
    np.testing.assert_allclose(turned(back, 24 + places), turned(k, places), atol=1e-5)


def test_every_document_is_last_once_and_is_continued():
    documents = [np.arange(100), np.arange(100, 130), np.arange(200, 300)]
    found = blend_quality.rotations(documents, 40, 10)
    assert [[int(p[0]) for p in passages] for passages, _ in found] == [[100, 200, 0], [200, 0, 100], [0, 100, 200]]
    assert [(len(p[-1]), c.tolist()) for p, c in found] == [
        (40, [*range(40, 50)]), (20, [*range(120, 130)]), (40, [*range(240, 250)]),
    ]  # fmt: skip


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of four layers and three texts."""
    made = tmp_path_factory.mktemp("blend")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_folder, "CONFIG", dataclasses.replace(tiny_folder.CONFIG, layers=4))
        (made / "model").mkdir()
        tiny_folder.make(made / "model")
    text = " ".join(CORPUS) if not isinstance(CORPUS, str) else CORPUS
    for number in range(3):
        (made / f"{number}.txt").write_text((f"Part {number}. " + text * 3)[: 200 + 50 * number])
    return made


def run(folder, *args, documents=("0.txt", "1.txt", "2.txt")):
    given = ["check", "--model", str(folder / "model"), "--documents", *(str(folder / name) for name in documents)]
    return blend_check.main([*given, "--tokens", "40", "--continuation", "8", *args])


def test_the_verdict_is_the_exit_code_and_the_report_is_consistent(folder, capsys):
    code = run(folder, "--json", "--ratios", "0.5", "1", "--threshold", "1e-9", "--ratio", "0.15", "--quiet")
    report = json.loads(capsys.readouterr().out)
    assert code == 1 and report["passed"] is False
    assert [row["ratio"] for row in report["ratios"]] == [0, 0.15, 0.5, 1]
    assert [row["random_kl"] is None for row in report["ratios"]] == [True, False, False, True]
    kl = [row["kl"] for row in report["ratios"]]
    assert kl[0] > kl[3] and abs(kl[3]) < 1e-6
    assert report["least_ratio_that_passes"] in (None, 1)
    assert (report["prompts"], report["scored_tokens"], report["prepare"]) == (3, 21, "alone")
    assert [document["tokens"] for document in report["documents"]] == [40, 40, 40]
    assert run(folder, "--threshold", "100", "--prepare", "bos", "--plot", str(folder / "kl.png")) == 0
    out = capsys.readouterr().out
    assert "plain reuse" in out and "at most the threshold of 100" in out
    assert (folder / "kl.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--ratio", "1.5"], "ratio 1.5 must be from 0 to 1"),
        (["--ratios", "-1"], "ratio -1.0 must be from 0 to 1"),
        (["--threshold", "0"], "--threshold 0.0 must be above 0"),
        (["--tokens", "0"], "--tokens 0 must be at least 1"),
        (["--continuation", "1"], "--continuation 1 must be at least 2"),
        (["--plot", "x.bmp"], "must end in .png"),
        (["--tokens", "100"], "lower --tokens"),
        (["--continuation", "200"], "document 1 has"),
    ],
)
def test_what_cannot_work_is_refused(folder, capsys, args, words):
    assert run(folder, *args) == 2
    assert words in capsys.readouterr().err


def test_one_document_is_refused(folder, capsys):
    assert run(folder, documents=("0.txt",)) == 2
    assert "at least two" in capsys.readouterr().err
    assert run(folder, documents=("0.txt", "missing.txt")) == 2
