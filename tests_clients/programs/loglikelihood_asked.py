"""Run by lm-eval's own Python: ``loglikelihood_asked.py FOLDER URL MODEL TOKENIZER tokens|text``: one task of the
folder's rows through lm-eval's ``local-completions``, unchanged. Prints a line of JSON: what it found for choices."""

import json
import sys
from pathlib import Path

from lm_eval import simple_evaluate  # type: ignore[import-not-found]
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

folder, url, model, tokenizer, how = sys.argv[1:]
Path(folder, "task.yaml").write_text(
    f"task: ours\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{folder}/rows.jsonl'}}}}\n"
    "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_target: gold\n"
    "doc_to_choice: choices\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n", encoding="utf-8")
arguments = {"model": model, "base_url": url, "tokenizer": tokenizer, "tokenized_requests": how == "tokens",
             "num_concurrent": 4, "max_retries": 1}
found = simple_evaluate("local-completions", model_args=arguments, tasks=["ours"], bootstrap_iters=0,
                        task_manager=TaskManager(include_path=folder, include_defaults=False))
samples = sorted(found["samples"]["ours"], key=lambda sample: sample["doc_id"])
print(json.dumps([[float(reply[0]) for reply in sample["filtered_resps"]] for sample in samples]))
