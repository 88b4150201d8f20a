"""From a reply's text to content, reasoning and tool calls: incremental parsers of the families' formats.

`select_parser` makes the parser of one reply. Modules: parts (what comes out), selection, families and reasoning (the
tables), tool_parser (content and calls), one module per kind of call format, and reader, outbox and values below them.
"""
