"""Which matrices become how many bits: precedence, recipes, files, and refusals that say what is accepted."""

import json

import pytest

from headrace_models.errors import SourceError, UnsupportedArchitecture
from headrace_models.packing_plan import BitsRule, Packing, check_packing, plan_packing, read_bits_file

SHAPES = {"model.embed_tokens.weight": (320, 128), "model.norm.weight": (128,)} | {
    f"model.layers.{index}.{name}.weight": shape
    for index in range(8)
    for name, shape in {
        "self_attn.v_proj": (64, 128),
        "mlp.down_proj": (128, 192),
        "mlp.up_proj": (192, 128),
        "odd": (128, 40),
        "norm": (128,),
    }.items()
}
FOUR = Packing(bits=4, group_size=64)


def plan(packing=FOUR, **options):
    return plan_packing(SHAPES, packing, num_layers=8, **options)


def test_every_matrix_is_planned_and_only_those():
    """Vectors have no plan; rows that are no multiple of the group stay unpacked."""
    found = plan()
    assert len(found) == 1 + 8 * 4
    assert found["model.embed_tokens"] == found["model.layers.3.mlp.down_proj"] == FOUR
    assert {path for path, one in found.items() if one is None} == {f"model.layers.{index}.odd" for index in range(8)}


def test_the_last_rule_that_matches_decides():
    """Patterns match whole paths, with `*` over dots; a rule's own group size wins over that of all."""
    rules = [
        BitsRule(pattern="*.down_proj", bits=8, group_size=32),
        BitsRule(pattern="model.layers.0.*", bits=None),
        BitsRule(pattern="model.layers.0.mlp.up_proj", bits=6),
    ]
    found = plan(rules=rules)
    assert found["model.layers.1.mlp.down_proj"] == Packing(bits=8, group_size=32)
    assert found["model.layers.0.mlp.down_proj"] is None
    assert found["model.layers.0.mlp.up_proj"] == Packing(bits=6, group_size=64)
    assert found["model.embed_tokens"] == FOUR


def test_recipes_keep_the_ends_finer():
    """First and last eighth and every third layer between: values and down projections with more bits."""
    found = plan(recipe="mixed_2_6")
    finer = [index for index in range(8) if found[f"model.layers.{index}.mlp.down_proj"].bits == 6]
    assert finer == [0, 3, 6, 7]
    assert found["model.layers.0.self_attn.v_proj"].bits == 6
    assert found["model.layers.0.mlp.up_proj"].bits == found["model.embed_tokens"].bits == 2


@pytest.mark.parametrize("name", ["bits.toml", "bits.json"])
def test_bits_files_in_both_forms(tmp_path, name):
    """Numbers, tables and "none", in the file's order."""
    path = tmp_path / name
    if name.endswith("toml"):
        path.write_text('"*" = 3\n"*.mlp.*" = { bits = 6, group_size = 32 }\n"lm_head" = "none"\n')
    else:
        path.write_text(json.dumps({"*": 3, "*.mlp.*": {"bits": 6, "group_size": 32}, "lm_head": "none"}))
    assert read_bits_file(path) == [
        BitsRule(pattern="*", bits=3),
        BitsRule(pattern="*.mlp.*", bits=6, group_size=32),
        BitsRule(pattern="lm_head", bits=None),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ("[1]", "holds a list"),
        ('{"*": "four"}', r"'\*'.*'four'"),
        ('{"*": true}', "True"),
        ('{"*": {"group_size": 32}}', "group_size"),
        ('{"*": {"bits": 4, "mode": "x"}}', "mode"),
        ('{"*": 4.0}', r"4\.0"),
        ('{"*": {"bits": "none", "group_size": 32}}', "none"),
    ],
)
def test_other_bits_files_are_refused(tmp_path, text, problem):
    """With the entry, and what is expected."""
    (tmp_path / "bits.json").write_text(text)
    with pytest.raises(SourceError, match=problem):
        read_bits_file(tmp_path / "bits.json")


def test_a_missing_bits_file_is_named(tmp_path):
    """The path is in the message."""
    with pytest.raises(SourceError, match="absent"):
        read_bits_file(tmp_path / "absent.toml")


@pytest.mark.parametrize(("bits", "group_size"), [(7, 64), (1, 64), (16, 64), (4, 16), (4, 0), (4, 256), (True, 64)])
def test_numbers_that_mlx_does_not_pack_with_are_refused(bits, group_size):
    """The message lists what is accepted."""
    with pytest.raises(ValueError, match="choose one of"):
        check_packing(bits, group_size)


def test_rules_that_cannot_be_are_refused():
    """A pattern that matches nothing names the kinds of matrices; others name pattern, value and matrix."""
    with pytest.raises(ValueError, match=r"'\*\.q_proj'.*model\.layers\.\*\.mlp\.up_proj"):
        plan(rules=[BitsRule(pattern="*.q_proj", bits=4)])
    with pytest.raises(ValueError, match=r"bits of pattern '\*' is 7"):
        plan(rules=[BitsRule(pattern="*", bits=7)])
    with pytest.raises(ValueError, match=r"rows of 40"):
        plan(rules=[BitsRule(pattern="*.odd", bits=4)])
    with pytest.raises(UnsupportedArchitecture, match="nothing would be packed"):
        plan(rules=[BitsRule(pattern="*", bits=None)])


def test_recipes_need_their_matrices():
    """A model without down projections is refused, as mlx-lm does."""
    with pytest.raises(UnsupportedArchitecture, match="bits file"):
        plan_packing({"model.embed_tokens.weight": (320, 128)}, FOUR, recipe="mixed_4_6", num_layers=0)
