"""The compiler of chat templates: jinja2's, with calls of the meter in the code that it writes.

Threads cannot be stopped and tracing is slow, so a template's own code must see that it does too much. Each loop turn
and macro call spends a step; operations that can make much of little are written as methods of the context.
"""

# ruff: noqa: N802  jinja2 finds the methods by the names of its nodes

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef

from headrace_models.meter import SHORT, STEP_COST

__all__ = ["MeteredGenerator"]

# An expression adds at most this many texts before their size is looked at.
_MAX_ADDS = 8


class MeteredGenerator(CodeGenerator):
    """Compiles a template with calls of the meter in it."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._costs: dict[int, int] = {}

    # ---- statements --------------------------------------------------------------------------------------

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        self._meter_body(node.body)
        if node.test is not None:
            # Items that fail the condition never reach the body.
            counted = nodes.Getattr(nodes.ContextReference(), "counted", "load")
            node.iter = nodes.Call(counted, [node.iter], [], None, None)
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, MacroRef]:
        self._meter_body(node.body)
        return super().macro_body(node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        cost = self._costs.get(id(nodes))
        if cost is not None:
            self.writeline("context.tick()" if cost <= SHORT else f"context.charge({cost})")
        super().blockvisit(nodes, frame)

    def _meter_body(self, body: list[nodes.Node]) -> None:
        static = sum(len(data.data) for node in body for data in node.find_all(nodes.TemplateData))
        self._costs[id(body)] = STEP_COST + static

    # ---- output ------------------------------------------------------------------------------------------

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        # Folding would run a template's operations while it is compiled, where no meter is.
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        del finalize
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            self.fail("autoescape does not exist in chat templates", node.lineno)
        # What goes out directly is measured by who renders; buffers are joined out of sight.
        self.write("(t_out if type(t_out := (" if frame.buffer is None else "context.shown((")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        del node, finalize
        self.write(")) is str else context.text_of(t_out))" if frame.buffer is None else "))")

    # ---- values that are kept ----------------------------------------------------------------------------

    def visit_Assign(self, node: nodes.Assign, frame: Frame) -> None:
        node.node = self._kept(node.node)
        super().visit_Assign(node, frame)

    def visit_With(self, node: nodes.With, frame: Frame) -> None:
        node.values = [self._kept(value) for value in node.values]
        super().visit_With(node, frame)

    def _kept(self, node: nodes.Node) -> nodes.Expr:
        if not isinstance(node, nodes.Add) and node.find(nodes.Add) is None:
            return cast("nodes.Expr", node)
        sized = nodes.Getattr(nodes.ContextReference(), "sized", "load")
        return nodes.Call(sized, [cast("nodes.Expr", node)], [], None, None)

    # ---- operations --------------------------------------------------------------------------------------

    def visit_Add(self, node: nodes.Add, frame: Frame) -> None:
        is_long = sum(1 for _ in node.find_all(nodes.Add)) % _MAX_ADDS == _MAX_ADDS - 1
        self.write("context.sized(" if is_long else "(")
        self.visit(node.left, frame)
        self.write(" + ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("context.joined((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        if not any(operand.op in {"in", "notin"} for operand in node.ops):
            super().visit_Compare(node, frame)
            return
        if len(node.ops) > 1:
            self.fail("'in' cannot be part of a chained comparison", node.lineno)
        (operand,) = node.ops
        self.write("(not context.contains(" if operand.op == "notin" else "(context.contains(")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(operand.expr, frame)
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._write_built(node, node.items, frame, super().visit_List)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._write_built(node, [pair.value for pair in node.items], frame, super().visit_Dict)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._write_built(node, node.items, frame, super().visit_Tuple)
        else:
            super().visit_Tuple(node, frame)

    def _write_built(
        self, node: nodes.Expr, items: Sequence[nodes.Expr], frame: Frame, visit: Callable[[Any, Frame], None]
    ) -> None:
        is_constant = all(isinstance(item, nodes.Const) for item in items)
        self.write("" if is_constant else "context.built(")
        visit(node, frame)
        self.write("" if is_constant else ")")
