"""What is typed into a panel is kept and sent, whatever is drawn over it or greyed: `forms.js` in a page alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.notebook import two_frames
from workbench_widgets import driver

FIELD = '<input data-act="iterations" value="3"><button data-act="run" data-drives>Run</button>'
PAGE = """
{source}
window.sent = [];
window.area = document.body.appendChild(document.createElement("div"));
listen(area, (act, given) => sent.push([act, given.value]));
Object.assign(window, {{ replace, enable }});
replace(area, `{field}`);
"""


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page()
    source = (driver.FOLDER / "forms.js").read_text().replace("export function", "function")
    page.add_script_tag(content=PAGE.format(source=source, field=FIELD))
    page.locator("input").fill("5")
    yield page
    page.close()


def draw_again(page: Any, text: str) -> None:
    page.evaluate("([html]) => replace(area, html)", [FIELD + text])


@pytest.mark.slow
def test_enter_sends_what_was_typed_once(page: Any) -> None:
    page.keyboard.press("Enter")
    page.wait_for_function("() => sent.length")
    draw_again(page, "<p>a stage has ended</p>")
    page.locator("button").focus()
    two_frames(page)
    assert page.evaluate("sent") == [["iterations", "5"]]


@pytest.mark.slow
def test_a_drawing_between_enter_and_its_answer(page: Any) -> None:
    page.evaluate("([html]) => area.addEventListener('keydown', () => replace(area, html))", [FIELD + "<p>new</p>"])
    page.keyboard.press("Enter")
    page.wait_for_function("() => sent.length")
    assert page.evaluate("sent") == [["iterations", "5"]]


@pytest.mark.slow
def test_a_button_that_is_drawn_again_while_it_is_pressed(page: Any) -> None:
    page.locator("button").hover()
    page.mouse.down()
    draw_again(page, "<p>a stage has ended</p>")
    two_frames(page)
    page.mouse.up()
    assert page.evaluate("sent") == [["iterations", "5"], ["run", None]]


@pytest.mark.slow
def test_a_press_that_is_no_click_makes_none_when_the_button_is_drawn_again(page: Any) -> None:
    button = page.locator("button")
    button.hover()
    page.mouse.down(button="right")
    draw_again(page, "<p>a stage has ended</p>")
    page.mouse.up(button="right")
    button.hover()
    page.mouse.down()
    page.mouse.move(600, 500)  # the press ends outside of the panel
    page.mouse.up()
    draw_again(page, "<p>another stage has ended</p>")
    page.mouse.down()
    button.hover()
    page.mouse.up()
    assert page.evaluate("sent") == [["iterations", "5"]]


@pytest.mark.slow
def test_a_field_that_is_greyed_and_drawn_again(page: Any) -> None:
    page.evaluate("enable(area, 'a cell is running', '')")
    two_frames(page)  # after a frame what is disabled has no focus
    draw_again(page, "<p>a stage has ended</p>")
    page.evaluate("enable(area, '', '')")
    assert page.locator("input").input_value() == "5"
    page.keyboard.press("Enter")
    page.wait_for_function("() => sent.length")
    assert page.evaluate("sent") == [["iterations", "5"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "number"])
def test_what_is_selected_in_a_field_that_is_drawn_again_is_replaced_by_what_is_typed(page: Any, kind: str) -> None:
    field = f'<input type="{kind}" data-act="clip" value="0.2">'
    page.evaluate("([html]) => replace(area, html)", [field])
    page.locator("input").select_text()
    page.evaluate("([html]) => replace(area, html)", [field + "<p>a stage has ended</p>"])
    page.keyboard.insert_text("0.001")
    assert page.locator("input").input_value() == "0.001"


@pytest.mark.slow
def test_the_caret_stays_where_it_was(page: Any) -> None:
    page.locator("input").fill("rewards 0.5")
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    draw_again(page, "<p>a stage has ended</p>")
    page.keyboard.insert_text(" >")
    assert page.locator("input").input_value() == "rewards > 0.5"


@pytest.mark.slow
def test_what_is_folded_is_known_by_its_words_not_by_its_place(page: Any) -> None:
    def details(words: str, *, opened: bool = False) -> str:
        return f"<details{' open' if opened else ''}><summary>{words}</summary>inside</details>"

    before = details("metrics shown: 3 of 8") + details("arguments", opened=True) + details("code")
    page.evaluate("([html]) => replace(area, html)", [before])
    page.get_by_text("code").click()
    page.get_by_text("metrics shown").click()
    after = details("metrics shown: 4 of 9") + details("what each time covers") + details("arguments", opened=True)
    page.evaluate("([html]) => replace(area, html)", [after + details("code")])
    assert page.evaluate("[...area.querySelectorAll('details')].map((one) => one.open)") == [True, False, True, True]
    assert page.evaluate("document.activeElement.textContent") == "metrics shown: 4 of 9", "the focus stays, too"
    page.locator("details").evaluate_all("all => { all[0].querySelector('summary').innerHTML += '<b tabindex=0></b>' }")
    page.locator("b").focus()  # what has no name of its own loses the focus, and nothing else
    page.evaluate("([html]) => replace(area, html)", [after])
    assert page.locator("details").count() == 3
