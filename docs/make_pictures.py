"""Draws docs/pictures/*.svg, from what the package itself computes: python docs/make_pictures.py [FOLDER]

Plain SVG, because boxes and words need no library: each file has a few kB, light and dark colours, and its alternative
text as a title. memory.svg draws the plan that a page of docs/ prints.
"""

import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from tests.lib.tokenized_text import made
from verl_ext.packing import CostModel, plan_packs
from verl_ext.packing.shared import find_shared, plan_shared
from verl_ext.parallel.experts import ExpertShare, expert_mesh
from verl_ext.parallel.shards import DocumentLayout, SequenceShards
from verl_ext.tools.show.cells import cells_of
from verl_ext.tools.show.documents import open_documents
from verl_ext.trainer.step_plan import StepPlan

PICTURES = Path(__file__).parent / "pictures"
WIDTH = 760
# kind: (light, dark). Letters are documents, ranks or packs.
FILLS = {
    "A": ("#cfe2ff", "#1f4b8e"),
    "B": ("#ffe2b8", "#7a4a12"),
    "C": ("#cdeed3", "#1d5c33"),
    "D": ("#e8dcff", "#553794"),
    "E": ("#ffd8e6", "#85305a"),
    "empty": ("#eff1f4", "#21262d"),
    "ground": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9198a1"),
}
EDGE = ("#afb8c1", "#484f58")
Draw = Callable[[], "Picture"]


class Picture:
    """An SVG in the making; `alt` says in a sentence what it shows."""

    def __init__(self, alt: str, height: float) -> None:
        self.alt, self.height, self.parts = alt, height, [""]

    def box(self, x: float, y: float, width: float, height: float, kind: str, words: str = "", style: str = "") -> None:
        """Draw a box, with words in its middle."""
        self.parts.append(
            f'<rect class="{kind} edge" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + 4.5, words, f"{style} middle")

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """Write words; style: soft, small, bold, mono, middle, end."""
        kind = f"{'' if 'soft' in style else 'ink '}{style}".strip()
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words, quote=False)}</text>')

    def line(self, *places: tuple[float, float], style: str = "") -> None:
        """Draw a line; style: arrow, dashed."""
        path = " L".join(f"{x:g},{y:g}" for x, y in places)
        end = ' marker-end="url(#tip)"' if "arrow" in style else ""
        self.parts.append(f'<path class="line {style}" d="M{path}"{end}/>')

    def legend(self, y: float, **kinds: str) -> None:
        """Write what each colour is, from the left margin on."""
        x = 20.0
        for kind, words in kinds.items():
            self.box(x, y - 11, 14, 14, kind)
            self.text(x + 20, y, words, "small soft")
            x += 40 + 6.3 * len(words)

    def svg(self) -> str:
        """Return the file's text."""
        light, dark = ("".join(f".{name}{{fill:{colours[at]}}}" for name, colours in FILLS.items()) for at in (0, 1))
        lines = [f".edge{{stroke:{colour}}}.line{{stroke:{colour}}}.tip{{fill:{colour}}}" for colour in EDGE]
        style = (
            f"text{{font:13px system-ui,sans-serif}}.small{{font-size:12px}}.bold{{font-weight:600}}"
            f".mono{{font:12px ui-monospace,monospace;white-space:pre}}"
            f".middle{{text-anchor:middle}}.end{{text-anchor:end}}"
            f".line{{fill:none;stroke-width:1.5}}.dashed{{stroke-dasharray:4 4}}{light}{lines[0]}"
            f"@media (prefers-color-scheme:dark){{{dark}{lines[1]}}}"
        )
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" role="img">',
            f"<title>{escape(self.alt)}</title><style>{style}</style>",
            f'<defs>{tip}<path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>',
            f'<rect class="ground" width="{WIDTH}" height="{self.height:g}" rx="6"/>',
        )
        return "\n".join([*head, *self.parts[1:], "</svg>\n"])


def letter(number: int) -> str:
    """Return the colour of a document, pack or rank."""
    return "ABCDE"[number % 5]


def document() -> Picture:
    """The documents of a pack: positions, and what each token sees."""
    picture = Picture(
        "A pack of three documents: positions start at 0 in each, and a token sees those before it in its document",
        390,
    )
    layout = DocumentLayout.from_lengths([5, 4, 3], "cpu")
    positions = layout.positions().tolist()
    owner = [number for number, length in enumerate(layout.lengths) for _ in range(length)]
    names = [f"{'abc'[number]}{position}" for number, position in zip(owner, positions, strict=True)]
    size, left, top = 25, 130, 74
    picture.text(left - 12, 38, "tokens", "soft end")
    picture.text(left - 12, 62, "position_ids", "soft end")
    for at, (name, position) in enumerate(zip(names, positions, strict=True)):
        picture.box(left + at * size, 20, size, 24, letter(owner[at]), name, "small")
        picture.text(left + (at + 0.5) * size, 62, str(position), "small middle")
        picture.box(left - size - 4, top + at * size, size, size, letter(owner[at]), name, "small")
        for seen in range(len(names)):
            is_seen = owner[seen] == owner[at] and positions[seen] <= positions[at]
            picture.box(left + seen * size, top + at * size, size, size, letter(owner[at]) if is_seen else "empty")
    notes = ("One pack, three documents.", "", "A row is a token that looks,", "a column a token that it sees.", "")
    notes += ("A token sees its own document", "up to itself, as if the document", "were alone. Positions restart,")
    for row, words in enumerate((*notes, "so that nothing tells the documents", "of a pack from documents alone.")):
        picture.text(left + 12 * size + 40, 96 + row * 21, words)
    return picture


def sources() -> Picture:
    """Files, the categories that they are tokenized into, and the losses of a run."""
    files = {"maths": ["gsm8k.jsonl", "algebra.jsonl"], "code": ["code.jsonl"]}
    picture = Picture("Three files are sources of two categories, and each category has a loss curve of its own", 222)
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer(CHATML).save_pretrained(f"{folder}/model")
        records = [{"question": f"the cat {number}", "answer": "sat on the mat"} for number in range(20)]
        counts = {name: records[: 20 * len(paths)] for name, paths in files.items()}
        made(Path(folder) / "data", Path(folder) / "model", counts)
        names = open_documents([f"{folder}/data/out"]).names
    for x, words in ((20, "sources: files that you name"), (300, "categories"), (530, "what a run logs")):
        picture.text(x, 30, words, "bold")
    y = 48.0
    for number, (category, paths) in enumerate(files.items()):
        middle = y + (len(paths) * 50 - 14) / 2
        for at, path in enumerate(paths):
            picture.box(20, y + at * 50, 190, 36, "empty", path, "mono")
            picture.line((212, y + at * 50 + 18), (296, middle), style="arrow")
        assert category in names.values()
        picture.box(300, middle - 18, 140, 36, letter(number), category)
        picture.line((442, middle), (526, middle), style="arrow")
        picture.box(530, middle - 18, 210, 36, letter(number), f"train/{category}_loss", "mono")
        y += len(paths) * 50
    picture.text(20, 208, "data.sources={maths:[gsm8k.jsonl,algebra.jsonl],code:code.jsonl}", "mono soft")
    return picture


CHAT = [
    {"role": "user", "content": "Which day is 7 days after Saturday?"},
    {"role": "assistant", "content": "It is Saturday again."},
    {"role": "user", "content": "And the day before it?"},
    {"role": "assistant", "content": "Friday."},
]


def mask() -> Picture:
    """The tokens of a chat, and which of them are targets."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = "\n".join(message["content"] for message in CHAT) + "\nuser\nassistant\n"
        model, data = Path(folder) / "model", Path(folder) / "data"
        tokenizer = tiny_tokenizer(CHATML, corpus=(corpus,) * 8)
        tokenizer.save_pretrained(model)
        made(data, model, {"chats": [{"messages": CHAT}]})
        row = open_documents([str(data / "out")]).row(0)
        cells = cells_of(row, tokenizer)
    picture = Picture("A chat as tokens: the assistant's turns and the tokens that end them are targets", 264)
    x, y = 20.0, 20.0
    picture.text(x, y + 12, "one record, as the model reads it", "bold")
    y -= 8
    for cell in cells:
        words = cell.text.replace("\n", "\\n").strip(" ")
        if cell.is_special and "start" in words:
            x, y = 20.0, y + 36
        width = 7.3 * len(words) + 9
        kind = "C" if cell.is_target else "D" if cell.is_special else "empty"
        picture.box(x, y, width, 26, kind, words, "mono")
        x += width + 3
    picture.legend(y + 58, C="target: the model learns to predict it", D="special token", empty="context")
    targets = int(row.loss_mask.sum())
    picture.text(20, y + 88, f"{targets} of {len(row.loss_mask)} tokens are targets. The loss is a mean over targets.")
    return picture


def packing() -> Picture:
    """The same documents as a padded batch and as packs."""
    lengths, most, batch = [33, 9, 24, 52, 7, 40, 17, 64, 12, 28, 20, 11], 64, 4
    picture = Picture("Twelve documents in padded batches, mostly padding, and in full packs", 338)
    plan = plan_packs(lengths, max_tokens=most)
    scale, height = 5.2, 20

    def row(x: float, y: float, documents: Sequence[int], end: int) -> None:
        picture.box(x, y, end * scale, height, "empty")
        for number in documents:
            picture.box(x, y, lengths[number] * scale, height, letter(number), str(number + 1), "small")
            x += lengths[number] * scale

    padded = 0
    for first in range(0, len(lengths), batch):
        longest = max(lengths[first : first + batch])
        padded += longest * batch
        for number in range(first, first + batch):
            row(20, 50 + number * (height + 2) + first / batch * 8, [number], longest)
    for pack in range(plan.num_packs):
        row(400, 50 + pack * (height + 6), plan.documents(pack).tolist(), most)
    total = sum(lengths)
    picture.text(20, 34, f"padded batches of {batch}: {total / padded:.0%} is tokens", "bold")
    whole = plan.num_packs * most
    picture.text(400, 34, f"packs of {most} tokens: {total / whole:.0%} is tokens", "bold")
    notes = (f"The same {len(lengths)} documents, {total} tokens.", f"Padded, the model computes {padded} positions,")
    for at, words in enumerate((*notes, f"packed {whole}. Documents of a pack", "do not see each other.")):
        picture.text(400, 224 + at * 21, words)
    picture.box(400, 306, 14, 14, "empty")
    picture.text(420, 317, "padding", "small soft")
    return picture


def step() -> Picture:
    """Two steps of eight packs on four ranks, as the balanced order deals them."""
    ranks, batch, most = 4, 8, 64
    rng = np.random.default_rng(3)
    lengths = np.minimum(rng.lognormal(2.6, 0.9, 140).astype(int) + 2, most)
    plan = plan_packs(lengths, max_tokens=most)
    costs = CostModel(linear=8, quadratic=1).packs(plan, lengths)[:16]
    steps = StepPlan(16, batch, seed=1, costs=costs, group_size=ranks)
    picture = Picture(
        "Two steps of eight packs on four ranks: packs of similar cost run together, then the weights change",
        250,
    )
    scale = 600 / sum(max(costs[steps.packs(s)[m : m + ranks]]) for s in (0, 1) for m in (0, ranks))
    x = 80.0
    for rank in range(ranks):
        picture.text(20, 76 + rank * 34, f"rank {rank}")
    for number in (0, 1):
        picture.text(x, 30, f"step {number + 1}", "bold")
        for slot in range(batch // ranks):
            packs = [steps.rank_packs(number, rank, ranks)[slot] for rank in range(ranks)]
            longest = max(costs[packs]) * scale
            for rank, pack in enumerate(packs):
                y = 58 + rank * 34
                picture.box(x, y, longest, 26, "empty")
                picture.box(x, y, costs[pack] * scale, 26, letter(2 * number + slot), f"pack {pack}", "small")
            x += longest + 4
        picture.line((x + 4, 44), (x + 4, 196))
        picture.text(x + 2, 212, "update", "small soft middle")
        x += 14
    picture.text(
        20, 236, "data.train_batch_size=8: eight packs a step. Grey: a rank waits for the slowest one.", "small soft"
    )
    return picture


def ranks() -> Picture:
    """Four ranks with packs of their own, and four that share one."""
    picture = Picture("Four ranks with a pack each, and four ranks that each hold a quarter of one pack", 258)
    documents = ([16], [9, 7], [5, 11], [6, 4, 6])
    scale = 10.0
    picture.text(20, 30, "data-parallel: a pack each", "bold")
    picture.text(400, 30, "parallel=ulysses4: one pack", "bold")
    for rank, lengths in enumerate(documents):
        y = 50 + rank * 36
        picture.text(20, y + 17, f"rank {rank}")
        x = 80.0
        for number, length in enumerate(lengths):
            picture.box(x, y, length * scale, 26, letter(number + rank), "")
            x += length * scale
        picture.text(x + 12, y + 17, f"pack {rank}", "small soft")
    tokens, scale = 32, 10.0
    edges = (0, 12, 19, 32)
    for rank, [span] in enumerate(SequenceShards(4).spans_of_ranks(tokens)):
        y = 104 + rank * 30
        for number, (begin, end) in enumerate(itertools.pairwise(edges)):
            if (first := max(begin, span.start)) < (last := min(end, span.end)):
                picture.box(400 + first * scale, 50, (last - first) * scale, 26, letter(number))
                picture.box(400 + first * scale, y, (last - first) * scale, 22, letter(number))
        at = (span.end * scale + 408, "") if rank < 2 else (span.start * scale + 392, "end")
        picture.text(at[0], y + 16, f"rank {rank}: tokens {span.start}–{span.end - 1}", f"small {at[1]}")
        picture.line((400 + span.end * scale, 44), (400 + span.end * scale, 82), style="dashed")
    picture.text(
        20, 242, "Colours are documents. Attention of the shared pack exchanges heads for tokens.", "small soft"
    )
    return picture


def groups() -> Picture:
    """What each of four ranks holds outside and inside attention: Ulysses 2, in two groups."""
    shards, tokens, heads = SequenceShards(ulysses=2, context=2), 16, 4
    picture = Picture(
        "Four ranks share a pack: outside attention each has some tokens of all heads, inside it some heads of all "
        "tokens of its group",
        272,
    )
    spans = shards.spans_of_ranks(tokens)
    holder = {token: rank for rank, parts in enumerate(spans) for part in parts for token in range(*part)}
    width, height = 20, 28
    for x, words in ((20, "outside attention"), (420, "inside attention")):
        picture.text(x, 30, words, "bold")
        picture.text(x, 52, "16 tokens of a pack →", "small soft")
        for head in range(heads):
            for token in range(tokens):
                rank = holder[token]
                if words.startswith("inside"):  # an all-to-all among the ranks of the token's group
                    rank = rank // shards.ulysses * shards.ulysses + head * shards.ulysses // heads
                picture.box(x + token * width, 62 + head * height, width, height, letter(rank))
            picture.text(x + tokens * width + 4, 80 + head * height, f"head {head}" if x < 400 else "", "small soft")
    middle = 62 + heads * height + 28
    picture.legend(middle, A="rank 0 (group 0)", B="rank 1 (group 0)", C="rank 2 (group 1)", D="rank 3 (group 1)")
    notes = ("Ulysses: the ranks of a group exchange tokens for heads, and back.",)
    notes += ("Groups: each has an early and a late chunk, and receives the keys of documents that begin before it.",)
    for at, words in enumerate(notes):
        picture.text(20, middle + 28 + 21 * at, words)
    return picture


def z() -> Picture:
    """The targets of all packs of a step, and the one number that divides their losses."""
    targets, losses = [30, 10, 45, 15], [1.2, 2.4, 0.8, 2.0]
    picture = Picture("Z is the number of targets of all packs and ranks of a step; every loss is divided by it", 226)
    total = sum(targets)
    for rank in (0, 1):
        y = 50 + rank * 52
        picture.text(20, y + 22, f"rank {rank}")
        for slot in (0, 1):
            pack = 2 * rank + slot
            x = 80 + slot * 220
            picture.box(x, y, 208, 36, "empty")
            picture.box(x + 208 - 1.2 * targets[pack], y, 1.2 * targets[pack], 36, "C")
            picture.text(x + 8, y + 22, f"{targets[pack]} targets, mean loss {losses[pack]:g}", "small")
    picture.text(80, 34, "a step: two packs on each of two ranks", "bold")
    picture.line((514, 94), (536, 94), style="arrow")
    picture.box(540, 74, 206, 40, "C", f"Z = {' + '.join(map(str, targets))} = {total}")
    exact = sum(count * loss for count, loss in zip(targets, losses, strict=True)) / total
    of_ranks = [np.average(losses[at : at + 2], weights=targets[at : at + 2]) for at in (0, 2)]
    words = f"Loss of the step: the sum of all targets' losses over Z = {exact:.2f}, for any ranks and packs."
    picture.text(20, 180, words)
    words = f"Not used: the mean of ranks' means = {np.mean(of_ranks):.2f}, of packs' means = {np.mean(losses):.2f}."
    picture.text(20, 204, words, "soft")
    return picture


def prefixes() -> Picture:
    """Three documents with a common beginning, whole and computed once."""
    texts = ["ssssssqqaa", "ssssssrrb", "ssssssru"]
    lengths = np.array([len(text) for text in texts])

    def read(documents: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
        parts = [texts[d][f : f + n] for d, f, n in zip(documents, first, count, strict=True)]
        return np.frombuffer("".join(parts).encode(), np.uint8)

    plan = plan_shared(lengths, find_shared(lengths, 2, read), 32, "best_fit", 0)
    order, begins = plan.documents(0).tolist(), plan.begins_of(0).tolist()
    picture = Picture("Three documents that begin alike: whole, and as a tree that computes shared tokens once", 232)
    size, left = 26, 420
    computed = int(plan.pack_tokens(lengths)[0])
    picture.text(20, 30, f"whole: {lengths.sum()} tokens", "bold")
    picture.text(left, 30, f"data.share_prefixes=true: {computed} tokens", "bold")
    for row, (number, begin) in enumerate(zip(order, begins, strict=True)):
        y = 50 + row * 44
        for at, token in enumerate(texts[number]):
            kind = {"s": "empty", "q": "A", "a": "A", "r": "B", "b": "C", "u": "D"}[token]
            picture.box(48 + at * size, y, size, size, kind, token, "small")
            if at >= begin:
                picture.box(left + at * size, y, size, size, kind, token, "small")
        picture.text(20, y + 18, "ABC"[number])
        if row:
            x = left + (begin + 0.5) * size
            picture.line((x - size, y - 18), (x - size, y + 13), (x - size / 2 - 2, y + 13), style="arrow")
    notes = (
        "A row begins below the last token that it shares: that token is repeated, because another one follows it.",
    )
    notes += (
        "A token sees its own row and, to the left of it, the rows above. Losses are the same as for whole texts.",
    )
    for at, words in enumerate(notes):
        picture.text(20, 198 + 20 * at, words, "small soft")
    return picture


def experts() -> Picture:
    """Eight experts of a layer on four ranks, two of which share them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # makes ranks of a mesh without processes

    ranks, share, count = 4, 2, 8
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = expert_mesh(torch.distributed.init_device_mesh("cpu", (ranks,)), share).mesh.tolist()
    torch.distributed.destroy_process_group()
    picture = Picture("Eight experts on four ranks: two neighbours hold all of them and exchange tokens", 282)
    picture.text(20, 30, "parallel.expert_parallel=2 on four ranks, a layer of eight experts", "bold")
    for number, group in enumerate(mesh):
        x = 20 + number * 370
        picture.box(x, 48, 350, 148, "ground")
        picture.text(x + 175, 214, "these two hold all experts and exchange rows of tokens", "small soft middle")
        for place, rank in enumerate(group):
            own = ExpertShare(None, place, share, count // share, None).own  # type: ignore[arg-type]
            left = x + 12 + place * 182
            picture.text(left + 72, 70, f"rank {rank}", "middle")
            for at, expert in enumerate(range(own.start, own.stop)):
                picture.box(left + at * 36, 84, 34, 34, letter(place), f"{expert}", "small")
            picture.box(left, 150, 142, 30, "empty", f"tokens of rank {rank}", "small")
            picture.line((left + 71, 148), (left + 71, 124), style="arrow")
        picture.line((x + 100, 148), (x + 250, 124), style="arrow")
        picture.line((x + 248, 148), (x + 102, 124), style="arrow")
    pairs = " and ".join(f"{{{', '.join(str(group[place]) for group in mesh)}}}" for place in range(share))
    picture.text(20, 244, f"FSDP2 shards the same experts over ranks {pairs}. Everything else stays as without it.")
    picture.text(20, 266, "Each rank then gathers half of a layer's experts instead of all of them.", "small soft")
    return picture


def memory() -> Picture:
    """The memory of a step by part, as the page about plans prints it."""
    pages = (path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.rglob("*.md")))
    head = "memory: a step of 8 ranks on a fake GPU; every rank; a micro-batch of 1,048,576 tokens; GiB:"
    printed = next(page for page in pages if head in page).partition(head)[2].partition("```")[0]
    rows = {name: float(value) for name, value in re.findall(r"^  (\S.*?) {2,}([\d.]+)$", printed, re.MULTILINE)}
    peak, reserved = rows["peak"], float(re.findall(r"reserves ([\d.]+)", printed)[0])
    parts = [*itertools.takewhile(lambda name: name != "peak", rows)]
    picture = Picture("Memory of a step of Qwen3-8B on packs of a million tokens, by part, on one of eight GPUs", 300)
    picture.text(20, 32, "Qwen3-8B, packs of 1,048,576 tokens over 8 GPUs: GiB on each of them", "bold")
    kinds = {name: letter(at) for at, name in enumerate(name for name in parts if rows[name] > 0.1)}
    x, scale = 20.0, 720 / 80
    picture.box(x, 50, 720, 40, "empty")
    for at, name in enumerate(parts):
        width = rows[name] * scale
        kind = kinds.get(name, "empty")
        picture.box(x, 50, width, 40, kind, f"{rows[name]:.1f}" if width > 24 else "", "small")
        left, y = 20 + at % 2 * 260, 164 + at // 2 * 24
        picture.box(left, y - 11, 14, 14, kind)
        picture.text(left + 20, y, name)
        picture.text(left + 220, y, f"{rows[name]:.2f}", "end")
        x += width
    for value, words, y in ((peak, "peak", 112), (reserved, "reserved by the allocator", 132)):
        picture.line((20 + value * scale, 90), (20 + value * scale, y - 4), style="dashed")
        picture.text(26 + value * scale, y, f"{words}: {value:g}", "small")
    picture.text(740, 112, "80 GiB", "small soft end")
    note = "By verl-ext plan, which counts the allocations of the heaviest step. No GPU has run it."
    picture.text(20, 284, note, "small soft")
    return picture


DRAWN: dict[str, Draw] = {
    draw.__name__: draw
    for draw in (document, sources, mask, packing, step, ranks, groups, z, prefixes, experts, memory)
}


def main(folder: Path) -> None:
    """Write every picture into a folder."""
    for name, draw in DRAWN.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
