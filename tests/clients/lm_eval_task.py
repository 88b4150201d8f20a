"""A local multiple-choice task scored through lm-evaluation-harness and a running server's `/v1/completions`.

python lm_eval_task.py http://127.0.0.1:8080/v1

Nothing is fetched: the task's data is a file beside this one, and the harness asks the server for the tokens.
"""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval
from lm_eval.tasks import TaskManager

DATA = Path(__file__).with_name("lm_eval_questions.jsonl")
TASK = f"""
task: rivers
dataset_path: json
dataset_kwargs:
  data_files:
    test: {DATA}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
metadata:
  version: 1
"""


def main(base_url):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rivers.yaml").write_text(TASK)
        result = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=f"model=default_model,base_url={base_url}/completions,num_concurrent=8,max_length=2048",
            tasks=["rivers"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            log_samples=True,
        )
    samples = sorted(result["samples"]["rivers"], key=lambda sample: sample["doc_id"])
    report = {
        "client": "lm-evaluation-harness",
        "version": version("lm-eval"),
        "exercised": ["local-completions: loglikelihood by echo and logprobs", "/tokenizer_info and /tokenize"],
        "acc": result["results"]["rivers"]["acc,none"],
        "logprobs": [[float(one[0]) for one in sample["filtered_resps"]] for sample in samples],
        "is_greedy": [[bool(one[1]) for one in sample["filtered_resps"]] for sample in samples],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
