"""Grammars: what a reply must match, checked without a model and enforced token by token.

Modules: `spec` (`GrammarSpec`), `check` (`check_grammar`), `compiler` (`TokenizerFacts`, `GrammarCompiler`),
`controller` (`GrammarController`), and behind them `translate`, `engine`, `prefix` and `worker`. Only `spec` and the
errors work without the extra `grammar`.
"""
