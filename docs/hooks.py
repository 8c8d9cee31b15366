"""Pages link to `../benchmarks` and `../examples`, as GitHub has them; the site has both inside."""


def on_page_markdown(markdown: str, **_: object) -> str:
    """The links as the site has them."""
    for link, on_site in (("../benchmarks/", "benchmarks/"), ("../examples/", "examples/")):
        markdown = markdown.replace(f"]({link}", f"]({on_site}")
    return markdown.replace("](../docs/", "](../")
