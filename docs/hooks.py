"""Links and equations, which the site has in another form than GitHub."""

import html
import re

from latex2mathml.converter import convert


def on_page_markdown(markdown: str, **_: object) -> str:
    """Pages link to `../benchmarks` and `../examples`; the site has both inside."""
    for link, on_site in (("../benchmarks/", "benchmarks/"), ("../examples/", "examples/")):
        markdown = markdown.replace(f"]({link}", f"]({on_site}")
    return markdown.replace("](../docs/", "](../")


def on_page_content(content: str, **_: object) -> str:
    """Equations, which `pymdownx.arithmatex` has marked, as MathML: browsers need no script."""
    block = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)
    equation = lambda m: convert(html.unescape(m[1]), display="block")
    return block.sub(lambda m: f'<div style="overflow-x: auto">{equation(m)}</div>', content)
