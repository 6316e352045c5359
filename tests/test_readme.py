"""The README's example runs as it stands."""

import re
from pathlib import Path

from jdspark import save_drafter
from jdspark.presets import SMALL_K3, random_drafter

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(tmp_path, monkeypatch):
    (example,) = re.findall(r"<!-- the tests run this block -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    save_drafter("demo_checkpoint", SMALL_K3, random_drafter(SMALL_K3, 0))
    names = {}
    exec(compile(example, str(README), "exec"), names)
    outputs, state = names["outputs"], names["state"]
    assert outputs.next_tokens.shape == (1, 8)
    assert outputs.draft_tokens.shape == (1, 7)
    assert state.ctx_len[0] == 40 + outputs.num_accepted[0]
    assert outputs.advertised[0] == state.ctx_len[0]
