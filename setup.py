"""What pyproject.toml cannot say: all subpackages of `workbench`, and `widgets/` as the package `workbench_widgets`."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["workbench", "workbench.*"]),
        "workbench_widgets",
        *(f"workbench_widgets.{name}" for name in find_packages("widgets")),
    ],
    package_dir={"workbench_widgets": "widgets"},
)
