"""Pages link to `../benchmarks` and `../examples`, as GitHub has them; the site has both inside."""


def on_page_markdown(markdown: str, **_: object) -> str:
    """The links as the site has them."""
    return markdown.replace("](../benchmarks/", "](benchmarks/").replace(
        "](../examples/", "](examples/"
    )
