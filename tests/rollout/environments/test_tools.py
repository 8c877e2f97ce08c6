"""What a model is told of a function, and what reaches the function."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image

from hpcrl.rollout.environments.tool_worker import bounded, run_tool
from hpcrl.rollout.environments.tools import BadArguments, Tool, load_tools, tool, tool_schemas
from hpcrl.runtime.exits import InputError

REPOSITORY = Path(__file__).parents[3]


@dataclass
class Place:
    city: str
    zip: int | None = None


@tool
def forecast(
    place: Place, days: int, unit: Literal["C", "F"] = "C", json: list[float] | None = None, extra_info: Any = None
) -> str:
    """Tells the weather.

    Of any place,
    at any time.

    Args:
        place (Place): where: a city
            or a village
        days: how many

    Returns:
        days: not a parameter
    """
    return f"{place.city} {days} {unit} {json} {extra_info}"


def test_schema_is_made_of_signature_hints_and_docstring() -> None:
    schema = Tool.of(forecast).schema
    function = schema["function"]
    assert schema["type"] == "function" and function["name"] == "forecast"
    assert function["description"] == "Tells the weather. Of any place, at any time."
    parameters = function["parameters"]
    assert parameters["required"] == ["place", "days"] and parameters["additionalProperties"] is False
    assert list(parameters["properties"]) == ["place", "days", "unit", "json"]  # extra_info is the data's
    assert parameters["properties"]["place"]["description"] == "where: a city or a village"
    assert parameters["properties"]["days"] == {"type": "integer", "description": "how many"}
    assert parameters["properties"]["unit"] == {"enum": ["C", "F"], "type": "string", "default": "C"}
    assert "title" not in str(parameters["properties"])


@tool
def untyped(
    word: str, count: int, share: float, flag: bool, unit: Literal["C", 7], place: Place, note: str | None, other: Any
) -> list[Any]:
    return [word, count, share, flag, unit, place, note, other]


@pytest.mark.parametrize("flag", ["true", "True"])
@pytest.mark.parametrize("none", ["null", "None"])
def test_values_that_are_text_get_the_types_of_the_schema(flag: str, none: str) -> None:
    """As the formats of Qwen3.5 and GLM-4.5 have them."""
    given = {"word": "5", "count": "5", "share": " 5", "flag": flag, "unit": "7", "place": '{"city": "Bonn"}'}
    found = Tool.of(untyped).arguments(given | {"note": none, "other": "[1]"}, is_text=True)
    assert list(found.values()) == ["5", 5, 5.0, True, 7, Place("Bonn"), None, "[1]"]
    for name, text in (("count", "5.5"), ("count", "1" * 5000), ("flag", "yes"), ("place", "[" * 10**5), ("extra", "")):
        with pytest.raises(BadArguments, match=rf"untyped: {name}"):
            Tool.of(untyped).arguments(given | {"note": "null", "other": "", name: text}, is_text=True)
    assert Tool.of(untyped).arguments(given | {"note": "nothing", "other": "", "word": none}, True)["word"] == none


def test_arguments_that_follow_the_schema_reach_the_function() -> None:
    tools = {"forecast": Tool.of(forecast)}
    given = {"place": {"city": "Bern"}, "days": 2, "json": [1, 2.5]}
    assert run_tool(tools, "forecast", given, {"extra_info": {"k": 1}}).text == "Bern 2 C [1.0, 2.5] {'k': 1}"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"place": {"city": "Bern"}}, "days: Field required"),
        ({"place": {"city": "Bern"}, "days": "2"}, "days: Input should be a valid integer"),
        ({"place": {"city": "Bern"}, "days": 2.5}, "days: Input should be a valid integer"),
        ({"place": {"town": "Bern"}, "days": 2}, "place.city: Field required"),
        ({"place": {"city": "Bern"}, "days": 2, "unit": "K"}, "unit: Input should be 'C' or 'F'"),
        ({"place": {"city": "Bern"}, "days": 2, "year": 1}, "year: Extra inputs are not permitted"),
        ({"place": {"city": "Bern"}, "days": 2, "extra_info": {}}, "extra_info: Extra inputs are not permitted"),
        ({"place": {"city": "\ud800"}, "days": 2}, "forecast: "),
    ],
)
def test_other_arguments_never_do(given: dict[str, Any], says: str) -> None:
    found = Tool.of(forecast)
    with pytest.raises(BadArguments, match="forecast: "):
        found.arguments(given)
    answer = run_tool({"forecast": found}, "forecast", given, None)
    assert answer.rejected and says in answer.text


def test_unknown_tools_are_answered_by_the_known_ones() -> None:
    answer = run_tool({"forecast": Tool.of(forecast)}, "forcast", {}, None)
    assert answer.rejected and answer.text == "no tool 'forcast'; did you mean forecast? tools: forecast"


def test_answers_are_text_or_json_or_text_with_metrics() -> None:
    def answering(result: Any) -> Any:
        def made() -> Any:
            return result

        return run_tool({"made": Tool.of(made)}, "made", {}, None)

    assert answering("a b").text == "a b"
    assert answering({"a": [1, None]}).text == '{"a": [1, null]}'
    assert answering({"text": 3, "metrics": {"hits": 2, "bad": float("nan")}})[:2] == ("3", {"hits": 2.0})
    assert answering({"text": 3, "other": 1}).text == '{"text": 3, "other": 1}'
    assert len(bounded("x" * 10**6)) < 10**5


def test_pictures_of_a_tool_are_rgb(tmp_path: Path) -> None:
    red = Image.new("RGB", (6, 4), (255, 0, 0))
    red.save(tmp_path / "red.bmp")
    clear, ink = Image.new("RGBA", (6, 4), (255, 0, 0, 0)), Image.new("CMYK", (6, 4), (0, 255, 255, 0))

    def show(result: Any, max_pixels: int = 24) -> list[Any]:
        def made() -> Any:
            return result

        answer = run_tool({"made": Tool.of(made)}, "made", {}, None, max_pixels)
        images = [Image.open(io.BytesIO(png)) for png in answer.images]
        assert all(image.format == "PNG" and image.mode == "RGB" and image.size == (6, 4) for image in images)
        return [answer.text, *(image.getpixel((0, 0)) for image in images)]

    path = str(tmp_path / "red.bmp")
    whole = show({"text": "look", "image": [red, clear, ink, path, (tmp_path / "red.bmp").read_bytes()]})
    assert whole == ["look", (255, 0, 0), (255, 255, 255), (255, 0, 0), (255, 0, 0), (255, 0, 0)]
    assert show({"image": red}) == ["", (255, 0, 0)]
    for result, max_pixels, why in (
        ({"image": red}, 0, "no vision tower"),
        ({"image": red}, 23, "max_image_pixels=23"),
        ({"image": b"no picture"}, 24, "expected a picture"),
        ({"image": str(tmp_path / "none.png")}, 24, "no file"),
    ):
        with pytest.raises(ValueError, match=why):
            show(result, max_pixels)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", "marked @tool"),
        ("@tool\ndef f(x): pass", "no type hint"),
        ("@tool\ndef f(*x: int): pass", "by name"),
        ("@tool\nasync def f(x: int): pass", "coroutine"),
        ("class A: pass\n@tool\ndef f(x: A): pass", "schema"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_files_of_no_use_are_refused_in_one_line(tmp_path: Path, code: str, why: str) -> None:
    path = tmp_path / "tools.py"
    path.write_text(f"from hpcrl.rollout.environments.tools import tool\n{code}\n")
    with pytest.raises(InputError, match=why) as error:
        tool_schemas(str(path))
    assert "rollout.multi_turn.function_tool_path=" in str(error.value) and "\n" not in str(error.value)


def test_calculator_computes_and_evaluates_nothing() -> None:
    tools = load_tools(str(REPOSITORY / "configs" / "tools" / "calculator.py"))

    def calculate(expression: str) -> str:
        return run_tool(tools, "calculate", {"expression": expression}, None).text

    assert calculate("8 + 5 - 5 - 2") == "6" and calculate("(1-4)/2") == "-3/2"
    for refused in ("__import__('os')", "9**99", "1/0", "", "(" * 400):
        with pytest.raises((ValueError, ZeroDivisionError)):
            calculate(refused)
