"""The closing answer of a run: the last exported model is asked the first question of a file.

    python recipes/quickstart/answer.py --checkpoints checkpoints --ask val.jsonl

Plain transformers loads the model and generates: nothing here imports verl or this package.
"""

import argparse
import json
import os
import re
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def last_export(checkpoints: Path) -> Path:
    """The Hugging Face folder of the highest step. Raises ValueError where there is none."""
    found = {
        int(match[1]): path
        for path in checkpoints.glob("global_step_*/huggingface")
        if (match := re.fullmatch(r"global_step_(\d+)", path.parent.name))
    }
    if not found:
        raise ValueError(f"--checkpoints must hold global_step_N/huggingface; got {checkpoints}")
    return found[max(found)]


def first_question(path: Path) -> tuple[str, str]:
    """The first question of a jsonl file and its expected answer, from `messages` or `question` and `answer`."""
    with path.open(encoding="utf-8") as file:
        record = json.loads(file.readline())
    if "messages" in record:
        return record["messages"][0]["content"], record["messages"][1]["content"]
    return record["question"], record["answer"]


def ask(model_folder: Path, question: str, max_new_tokens: int) -> str:
    """The model's greedy answer, by plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=Path, required=True, help="trainer.default_local_dir of the run")
    parser.add_argument("--ask", type=Path, required=True, help="jsonl; its first question is asked")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    model_folder = last_export(arguments.checkpoints)
    print(f"  Model     {model_folder}")
    question, expected = first_question(arguments.ask)
    shown = question if len(question) < 300 else "… " + question[-200:]
    print(f"  Asked     {shown!r}\n  Expected  {expected!r}")
    print(f"  Answered  {ask(model_folder, question, arguments.max_new_tokens)!r}", flush=True)


if __name__ == "__main__":
    main()
