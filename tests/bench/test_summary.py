from blackwell_sparsek.bench.report.markdown import summary


def _case(name, peer, over_peer, over_dense=None):
    ratio = {"best_peer": peer, "over_best_peer": over_peer} if peer else {}
    ratio |= {} if over_dense is None else {"over_dense": over_dense}
    return {"name": name, "problem": {}, "peers": {}, "ratios": {"eager": ratio}}


def test_one_row_for_each_suite_names_its_worst_case():
    cases = [_case("a|b", "fa4", 1.2), _case("c", "cudnn", 0.8), _case("d", "fa4", 1.0)]
    products = [_case("e", "torch", 2.0, 3.0), _case("f", None, None, 1.0)]
    text = summary(
        [{"suite": "attention_dense", "cases": cases}, {"suite": "matmul_x", "cases": products}]
    )
    assert text.splitlines()[2:] == [
        "| attention dense, single calls | 3 | 0.80x, 1.00x, 1.20x | c (cudnn) |  |",
        "| matmul x, single calls | 2 | 2.00x, 2.00x, 2.00x | e (torch) | 1.00x, 2.00x, 3.00x |",
    ]


def test_first_calls_have_a_row():
    case = _case("attention, compiled before", "sdpa", 0.1)
    case["ratios"] = {"reported": case["ratios"]["eager"]}
    (row,) = summary([{"suite": "first_call", "cases": [case]}]).splitlines()[2:]
    assert row.startswith("| first call, fresh process | 1 | 0.10x, 0.10x, 0.10x | attention")


def test_suites_that_compare_nothing_have_no_row():
    alone = {"name": "a", "problem": {}, "peers": {}, "ratios": {}}
    assert summary([{"suite": "first_call", "cases": [alone]}]) == ""
    assert summary([]) == ""
