"""Serve answers made by rules, not by a model, to small recipes that need a model that follows instructions.

    python recipes/scripted_model.py PORT_FILE

listens on a free port of this machine, writes the port to PORT_FILE, and serves the model `scripted` in the form of
OpenAI's chat completions. It knows the chronicles of recipes/papers/longalign/make_data.py and the prompts of `verl-ext
synthesize` and `verl-ext judge`, and nothing else: its texts show that the stages fit together, and its verdicts are
shares of words.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SALE = re.compile(r"In (\d{4}) the (\w+) of (\w+) was sold to (\w+) for (\d+) coins\.")
ASKED = re.compile(r"To whom was the (\w+) of (\w+) sold in (\d{4})\?$")
REMARKS = (
    "The {subject} stands at the end of a long street that leads down to the river.",
    "Those who worked there rose before the sun and went home when the lamps were lit.",
    "In a wet spring the water came up to the door and stayed for eleven days.",
    "A book in the town hall names every keeper of the {subject} and what each of them was paid.",
    "Travellers liked the place, and some of them wrote about it to their families.",
    "When the roof had to be mended, the neighbours brought wood, nails and bread.",
    "Nobody could say who had planted the old tree in front of the {subject}.",
    "For many years the market was held beside it, and the children played under the carts.",
    "Its bell could be heard on the other side of the valley when the wind was right.",
    "At the end of the century the {subject} was still in use, and it was proud of its age.",
)
PLAN_WORDS = 100  # words of a paragraph
DIMENSIONS = ("Relevance", "Accuracy", "Coherence", "Clarity", "Breadth and Depth", "Reading Experience")


def answer(content: str) -> str:
    """Return the answer of the first rule that knows a user's message."""
    if "Write five questions about the text above" in content:
        sales = SALE.findall(content)
        chosen = [sales[number * len(sales) // 5] for number in range(5)]
        return "\n".join(f"{n}: To whom was the {s[1]} of {s[2]} sold in {s[0]}?" for n, s in enumerate(chosen, 1))
    if question := ASKED.search(content):
        building, town, year = question.groups()
        for sale in SALE.findall(content):
            if sale[:3] == (year, building, town):
                return f"In {year} the {building} of {town} was sold to {sale[3]} for {sale[4]} coins."
        return "The text does not say."
    if "Divide the work into paragraphs" in content:
        words = int(re.search(r"(\d+) words", content)[1])
        counts = [PLAN_WORDS] * (words // PLAN_WORDS - 1) + [PLAN_WORDS + words % PLAN_WORDS]
        return "\n".join(f"Paragraph {n} - Main Point: part {n} - Word Count: {c}" for n, c in enumerate(counts, 1))
    if "Now write the next paragraph" in content:
        number, words = map(int, re.findall(r"Paragraph (\d+) - Main Point: .* - Word Count: (\d+)", content)[-1])
        subject = re.search(r"about the (\w+)", content)[1]
        found: list[str] = []
        while len(found) < words:
            found += REMARKS[(number + len(found)) % len(REMARKS)].format(subject=subject).split()
        return " ".join(found[:words])
    if "<Response>" in content:
        said = content.partition("<Response>")[2].partition("</Response>")[0].split()
        known = {word for remark in REMARKS for word in remark.split()}
        score = 1 + round(4 * sum(word in known for word in said) / max(len(said), 1))
        return json.dumps({"Analysis": "the share of words that this script knows", **dict.fromkeys(DIMENSIONS, score)})
    if "[Reference answer begins]" in content:
        reference = content.partition("[Reference answer begins]")[2].partition("[Reference answer ends]")[0]
        said = content.rpartition("[Answer begins]")[2].partition("[Answer ends]")[0]
        expected = set(reference.split())
        share = len(expected & set(said.split())) / len(expected)
        return f"Rating: [[{1 + round(9 * share)}]]"
    return "I am a script and know no rule for this."


class Handler(BaseHTTPRequestHandler):
    """The two paths of OpenAI's API that a client needs."""

    protocol_version = "HTTP/1.1"
    model = "scripted"

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said, ended = self.reply(body)
        usage = {"prompt_tokens": len(str(body["messages"]).split()), "completion_tokens": len(said.split())}
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": ended}
        self._send({"model": self.model, "choices": [choice], "usage": usage})

    def reply(self, body: dict[str, Any]) -> tuple[str, str]:
        """Return the answer to a request, and why it ended."""
        return answer(body["messages"][-1]["content"]), "stop"

    def _send(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def serve(handler: type[Handler], port_file: str) -> None:
    """Listen on a free port, which is written to a file."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    partial = Path(f"{port_file}.partial")
    partial.write_text(str(server.server_port))
    partial.rename(port_file)
    server.serve_forever()


if __name__ == "__main__":
    serve(Handler, sys.argv[1])
