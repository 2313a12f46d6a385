"""Files that are read as plain text, and their names in reports."""

from __future__ import annotations

from pathlib import PurePosixPath


def _kinds(table: str) -> dict[str, str]:
    """The kind of each word, from a table of "kind: word word; kind: word …"."""
    entries = (entry.split(":") for entry in table.replace("\n", ";").split(";") if entry.strip())
    return {word: kind.strip() for kind, words in entries for word in words.split()}


_BY_SUFFIX = _kinds("""
    text: txt text log nfo me 1st asc srt vtt tokens; Markdown: md markdown mdown mkd mdx rmd qmd
    reStructuredText: rst rest; AsciiDoc: adoc asciidoc; Org: org; Textile: textile; wiki text: wiki mediawiki
    LaTeX: tex latex ltx sty cls bib dtx; Typst: typ; man page: man roff mdoc; Python: py pyi pyx pxd pyw
    JavaScript: js mjs cjs jsx; TypeScript: ts tsx mts cts; Java: java; C: c h
    C++: cc cpp cxx c++ hh hpp hxx h++ inl ipp tpp; CUDA: cu cuh; OpenCL: cl; Objective-C: m mm; Go: go; Rust: rs
    Ruby: rb rake gemspec erb; PHP: php phtml; C#: cs csx; F#: fs fsi fsx; Visual Basic: vb vbs bas; Kotlin: kt kts
    Swift: swift; Scala: scala sc; Groovy: groovy gradle; shell: sh bash zsh ksh fish; PowerShell: ps1 psm1 psd1
    batch: bat cmd; SQL: sql ddl; R: r; Julia: jl; Lua: lua; Perl: pl pm pod; Raku: raku rakumod; Haskell: hs lhs
    Elm: elm; PureScript: purs; OCaml: ml mli; Reason: re rei; Standard ML: sml sig; Elixir: ex exs; Erlang: erl hrl
    Clojure: clj cljs cljc edn; Lisp: lisp lsp el; Scheme: scm ss rkt; Prolog: pro prolog
    Fortran: f f77 f90 f95 f03 f08 for; COBOL: cob cbl; Pascal: pas pp; Ada: adb ads; D: d; Dart: dart; Zig: zig
    Nim: nim; Crystal: cr; V: v vv; Verilog: sv svh; VHDL: vhd vhdl; assembly: asm s nasm; LLVM: ll
    WebAssembly: wat; shader: glsl vert frag hlsl wgsl metal; Tcl: tcl; AWK: awk; Vim script: vim; Solidity: sol
    Coq: coq; Lean: lean; Agda: agda; Isabelle: thy; CSS: css scss sass less styl; Vue: vue; Svelte: svelte
    template: j2 jinja jinja2 hbs mustache ejs liquid haml pug; CMake: cmake; Make: mk mak; Nix: nix
    Starlark: bzl star; Terraform: tf tfvars hcl; Protocol Buffers: proto; Thrift: thrift; GraphQL: graphql gql
    YAML: yaml yml; TOML: toml; INI: ini cfg conf; properties: properties; diff: diff patch; translations: po pot
""")
_BY_NAME = _kinds("""
    text: readme license licence copying copyright notice authors contributors maintainers codeowners
    text: credits changelog changes history news todo install faq thanks version
    Make: makefile gnumakefile bsdmakefile; CMake: cmakelists.txt; Docker: dockerfile containerfile
    Ruby: gemfile rakefile podfile vagrantfile brewfile fastfile; Groovy: jenkinsfile
    Starlark: build workspace tiltfile; shell: configure; Meson: meson.build; Just: justfile; Procfile: procfile
    Go: go.mod
""")


def kind_of(name: str) -> str:
    """The kind of a file by its name: "Python", "C++"; "text" if the name is not listed here."""
    path = PurePosixPath(name.lower())
    return _BY_NAME.get(path.name) or _BY_SUFFIX.get(path.suffix.removeprefix("."), "text")
