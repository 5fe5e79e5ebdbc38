"""Every section of the five documents has its row in dev/from_the_documents.md, and all that the rows name exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from foredraft.methods import methods

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (ROOT / "dev" / "from_the_documents.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _listed(headings: str) -> list[str]:
    """Headings that bars divide."""
    return [" ".join(heading.split()) for heading in headings.split("|")]


HEADINGS: dict[str, list[str]] = {
    "000": _listed(
        r"""
        05. NASD 实现 | 目录 | 1. 代码架构概览 | 1.1 文件结构 | 1.2 函数签名 |
        1.3 与标准 Speculative Decoding 的区别 | 2. INgramStorage 抽象接口 | 2.1 接口定义 | 2.2 核心方法 |
        2.2.1 next_token：预测下一个 token | 2.2.2 update：更新统计 | 2.2.3 initialize：批量初始化 |
        3. OneLevelNGramStorage 实现 | 3.1 数据结构 | 3.2 next_token 实现 | 3.3 update 实现 |
        4. NGramStorage 实现 | 4.1 与 OneLevelNGramStorage 的区别 | 4.2 数据结构 | 4.3 回退策略实现 |
        4.4 initialize 实现 | 5. NASD 主函数 | 5.1 初始化 | 5.2 首次 Target Pass（可选） |
        5.3 草稿生成 (Ngram Drafter) | 5.4 并行验证 | 5.5 确定性验证 ⭐ | 5.6 样本调整（无需） |
        5.7 Ngram 更新 | 6. 关键参数说明 | 6.1 n: 最大 N-gram 阶数 | 6.2 filler_top_k: Top-K Filler |
        6.3 stop_if_unknown: 未知上下文处理 | 7. 小结 | 关键实现要点 | 代码引用速查 |
        与标准 Speculative Decoding 代码对比 | 下一步
        """
    ),
    "001": _listed(
        r"""
        03. Speculative Decoding 实现 | 目录 | 1. 代码架构概览 | 1.1 文件结构 | 1.2 函数签名 | 1.3 状态变量 |
        2. max_fn 函数：样本调整的核心 | 2.1 函数实现 | 2.2 数学对应 | 2.3 使用位置 |
        3. 主函数：speculative_generate | 3.1 初始化阶段 | 3.2 首次 Target Pass（可选） | 3.3 主循环 |
        3.3.1 动态 Gamma 调整 | 3.3.2 草稿生成 (Draft Generation) | 3.3.3 并行验证 (Parallel Verification) |
        3.3.4 拒绝采样 (Rejection Sampling) | 3.3.5 样本调整 (Sample Adjustment) | 3.3.6 更新和清理 |
        4. Logits Processor 设计 | 4.1 抽象基类 | 4.2 Greedy Processor | 4.3 Top-K Processor |
        4.4 Nucleus Processor (Top-p) | 5. KV Cache 管理 | 5.1 为什么需要修剪 Cache？ | 5.2 prune_cache 函数 |
        5.3 Tuple Cache 实现 | 5.4 Dynamic Cache 实现 | 5.5 调用位置 | 6. 调试与可视化 | 6.1 调试输出 |
        6.2 输出示例 | 7. 扩展：EGAG 集成点 | 7.1 EGAG（熵自适应 $\gamma$） | 8. 小结 | 关键实现要点 |
        代码引用速查 | 下一步
        """
    ),
    "002": _listed(
        r"""
        分类 | 小模型draft+大模型verify | Eagle | Eagle-2 | 大模型draft+verify | Medusa | Medusa Heads |
        Tree-based Attention | Sparse Tree | Implementation | Conclusion | Hydra | Hydra++ | Draft & Verify |
        Lookahead Decoding | Jacobi Decoding | Jacobi Trajectory | Lookahead Decoding | 通过检索生成draft |
        REST | Prompt Lookup Decoding | 与稀疏kv cache结合 | MagicDec | Reference
        """
    ),
    "003": _listed(
        r"""
        Implementation:Romsto Speculative Decoding Ngram Assisted Speculative Generate | Overview |
        Description | Usage | Code Reference | Source Location | Signature | Import | I/O Contract | Inputs |
        Outputs | Usage Examples | Basic NASD Generation | With Single-Level Storage
        """
    ),
    "004": _listed(
        r"""
        Implementation:Romsto Speculative Decoding NGramStorage | Overview | Description | Usage |
        Code Reference | Source Location | Signature | Import | I/O Contract | Inputs (Constructor) |
        Key Methods | Usage Examples | Multi-Level NGramStorage (Recommended) |
        Single-Level OneLevelNGramStorage | Related Pages | Implements Principle | Uses Heuristic |
        Page Connections
        """
    ),
}
"""Of every document, in their order."""

REFERENCES = ("2203.16487", "2211.17192", "2302.01318", "SafeAILab/EAGLE", "2305.10427", "2408.11049")
FAMILIES = {
    "A smaller model": {"draft_model", "eagle", "eagle2", "eagle3"},
    "The target itself": {
        "medusa",
        "hydra",
        "hydra++",
        "layer_skip",
        "quantized_self",
        "sparse_kv",
        "jacobi",
        "lookahead",
    },
    "Existing text": {"ngram", "nasd", "suffix", "rest", "token_recycling"},
}


def rows(document: str) -> list[list[str]]:
    """The cells of its table."""
    section = PAGE.split(f"\n## {document}: ")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines]


@pytest.mark.parametrize("document", HEADINGS)
def test_every_heading_has_its_row_and_every_row_says_something(document: str) -> None:
    found = rows(document)
    assert [row[0] for row in found] == HEADINGS[document]
    for row in found:
        assert len(row) == 4, row
        assert any(row[1:]), row
        if not row[2]:
            assert row[1] or row[3], row


@cache
def names_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_files_and_tests_that_are_named_exist() -> None:
    named = re.findall(r"`((?:[\w.]+/)+(?:[\w.]+\.py)?)(?:::(\w+))?`", PAGE)
    assert len(named) > 120
    for path, test in named:
        is_beside = path.startswith(("tests/", "benchmarks/", "docs/", "dev/"))
        place = ROOT / path if is_beside else ROOT / "src/foredraft" / path
        assert place.exists(), path
        assert not test or test in names_in(place), f"{path}::{test}"


def test_the_readme_groups_methods_by_the_families_of_the_survey() -> None:
    table = README.split("\n## Methods\n")[1].split("\n## ")[0]
    grouped: dict[str, set[str]] = {}
    for line in table.splitlines():
        if not line.startswith("| "):
            continue
        cell = line.split(" | ")[0]
        family = re.match(r"\| \*\*(.+)\*\*", cell)
        if family:
            grouped[family[1]] = set()
        elif grouped:
            grouped[list(grouped)[-1]] |= set(re.findall(r"`([\w+]+)", cell))
    assert list(grouped)[:3] == list(FAMILIES)
    for family, members in FAMILIES.items():
        assert members <= grouped[family]
    assert set().union(*FAMILIES.values()) | {"first", "union", "none"} >= set(methods()) - {"auto"}


def test_every_reference_of_the_survey_is_cited() -> None:
    pages = README + "".join(page.read_text(encoding="utf-8") for page in (DOCS / "methods").glob("*.md"))
    assert [reference for reference in REFERENCES if reference not in pages] == []


@pytest.mark.parametrize("method", sorted(set().union(*FAMILIES.values())))
def test_every_method_has_a_page(method: str) -> None:
    linked = re.search(rf"\[[^\]]*`{re.escape(method)}`[^\]]*\]\((docs/methods/\w+\.md)\)", README)
    assert linked, method
    assert (ROOT / linked[1]).exists()
