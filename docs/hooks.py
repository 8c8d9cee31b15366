"""Links, equations, indices and ranks in the search: on the site they differ from
GitHub's.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Pages link to `../benchmarks` and `../examples`, and these back to `docs`; the
    site has all inside.

    Pages of raw results come last in the search.
    """
    if page.file.src_uri.startswith("benchmarks/results/"):
        page.meta["search"] = {"boost": 0.1}
    for link, on_site in (
        ("../benchmarks/", "benchmarks/"),
        ("../examples/", "examples/"),
    ):
        markdown = markdown.replace(f"]({link}", f"]({on_site}")
    # These two link to files in the root of the repository.
    if page.file.src_uri in ("index.md", "contributing.md"):
        markdown = markdown.replace("](docs/", "](")
    return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)


def on_page_content(content: str, page: Any, config: Any, **_: object) -> str:
    """Notebooks get the repository's address, if it is known, and equations become
    MathML.
    """
    path = page.file.src_uri
    content = indices(
        mathml(colab(links_of_notebook(content, path), path, config.repo_url))
    )
    # A click on a picture shows it in full.
    return re.sub(
        r'<img [^>]*src="(?!data:)([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', content
    )


def links_of_notebook(content: str, path: str) -> str:
    """MkDocs turns links to pages into those of the site, except in notebooks."""
    if not path.endswith(".ipynb"):
        return content
    return re.sub(r'href="(\.\./[\w./-]+)\.md(#[^"]*)?"', r'href="../\1/\2"', content)


def colab(content: str, path: str, repo_url: str | None) -> str:
    """Adds the link that opens a notebook of docs/ in Colab, and the address to install
    from.
    """
    if not (repo_url and path.endswith(".ipynb")):
        return content
    repository = repo_url.rstrip("/").removeprefix("https://github.com/")
    url = f"https://colab.research.google.com/github/{repository}/blob/main/docs/{path}"
    link = f'<p><a href="{url}">Open in Colab</a></p>'
    return link + content.replace("OWNER/NAME", repository)


def indices(content: str) -> str:
    """Sets x_k and x_{k+1} lower, and ^{k+1} higher; not in code, whose words are in
    spans.
    """
    index = re.compile(
        r"(?<![\w.])([a-zA-ZΑ-ω])_(?:\{([^{}]+)\}|([a-z0-9])(?![a-zA-Z0-9_]))"
    )
    parts = re.split(r"(<span\b.*?</span>|<[^>]*>)", content, flags=re.DOTALL)
    for i in range(0, len(parts), 2):  # the texts between spans and tags
        text = index.sub(lambda m: f"{m[1]}<sub>{m[2] or m[3]}</sub>", parts[i])
        parts[i] = re.sub(r"\^\{([^{}]+)\}", r"<sup>\1</sup>", text)
    return "".join(parts)


def mathml(content: str) -> str:
    """Equations, which `pymdownx.arithmatex` has marked, as MathML: browsers need no
    script.
    """
    block = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)

    def equation(match: re.Match[str]) -> str:
        text = convert(html.unescape(match[1]), display="block")
        return f'<div style="overflow-x: auto">{text}</div>'

    return block.sub(equation, content)
