"""lm-eval over chat and over completions: answers that it generates, and how likely given ones are."""

import json
from pathlib import Path

from checks import API, MODEL, SCRATCH, TOKENIZER, begin, check
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

FOLDER = Path(SCRATCH, "tasks")
FOLDER.mkdir(exist_ok=True)
ROWS = [{"question": f"{i} + {i} =", "answer": str(2 * i), "choices": [f" {2 * i}", f" {2 * i + 1}"], "gold": 0}
        for i in range(1, 5)]
(FOLDER / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
DATA = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: '{FOLDER / 'rows.jsonl'}'}}}}\ntest_split: test\n"
(FOLDER / "generate.yaml").write_text(
    f"task: ours_generate\n{DATA}output_type: generate_until\ndoc_to_text: '{{{{question}}}}'\n"
    "doc_to_target: '{{answer}}'\ngeneration_kwargs: {until: [\"\\n\"], max_gen_toks: 8, do_sample: false}\n"
    "metric_list: [{metric: exact_match}]\n", encoding="utf-8")
(FOLDER / "choose.yaml").write_text(
    f"task: ours_choose\n{DATA}output_type: multiple_choice\ndoc_to_text: '{{{{question}}}}'\n"
    "doc_to_target: gold\ndoc_to_choice: choices\nmetric_list: [{metric: acc}]\n", encoding="utf-8")
TASKS = TaskManager(include_path=str(FOLDER), include_defaults=False)


def evaluate(kind: str, page: str, task: str, **more: object) -> None:
    arguments = {"model": MODEL, "base_url": f"{API}/{page}", "num_concurrent": 2, "max_retries": 1, **more}
    found = simple_evaluate(kind, model_args=arguments, tasks=[task], task_manager=TASKS, bootstrap_iters=0,
                            apply_chat_template="chat" in kind)
    assert len(found["samples"][task]) == len(ROWS)


begin("lm_eval")


@check("chat: generate")
def _() -> None:
    evaluate("local-chat-completions", "chat/completions", "ours_generate")


@check("completions: generate")
def _() -> None:
    evaluate("local-completions", "completions", "ours_generate", tokenizer=TOKENIZER)


@check("completions: loglikelihood")
def _() -> None:
    evaluate("local-completions", "completions", "ours_choose", tokenizer=TOKENIZER)
