"""This module owns the workloads on documents: JSON of a page, a RAG pipeline, questions on several documents."""

from __future__ import annotations

from typing import Any

from radixlm.bench.programs.workload import Size, Words, Workload
from radixlm.lang import function, gen

FIELDS = ("name", "place", "founded", "purpose", "size", "people")


#: The object that is decoded: keys that are fixed, values of some words. Forced text costs no sampling.
OBJECT = r"\{" + ", ".join(rf'"{field}": "[\w ]{{8,32}}"' for field in FIELDS) + r"\}"


@function
def extract(s: Any, instructions: str, page: str) -> None:
    s += instructions + "\nPage: " + page + "\nJSON: " + gen("json", max_tokens=160, regex=OBJECT)
    s += "\nIn one line:" + gen("line", max_tokens=12)


@function
def pipeline(s: Any, instructions: str, question: str, first: list[str], second: list[str]) -> None:
    """Two rounds of search and an answer. What is found is the generator's: there is no search engine here."""
    passages: list[str] = []
    for number, found in enumerate((first, second), 1):
        with s.copy() as query:
            query += instructions + "\nFind what to search for.\n" + _context(passages)
            query += "Question: " + question + f"\nQuery {number}:" + gen("query", max_tokens=10)
            s[f"query{number}"] = query["query"]
        passages += found
    s += instructions + "\nAnswer from the context.\n" + _context(passages)
    s += "Question: " + question + "\nAnswer:" + gen("answer", max_tokens=20)


def _context(passages: list[str]) -> str:
    return "".join(f"[{i}] {text}\n" for i, text in enumerate(passages, 1))


@function
def read(s: Any, instructions: str, documents: list[str], question: str) -> None:
    s += instructions + "".join(f"\nDocument {i}: {text}" for i, text in enumerate(documents, 1))
    s += "\nQuestion: " + question + "\nAnswer:" + gen("answer", max_tokens=20)


def json_decoding(words: Words, size: Size) -> Workload:
    head = f"Extract what a page says as JSON.\n{words.text(120)}"
    items = [{"instructions": head, "page": words.text(400)} for _ in range(size.count(6))]
    return Workload("json", f"JSON decoding: {len(FIELDS)} fields of a page by a regex", extract, items)


def rag(words: Words, size: Size) -> Workload:
    head = f"You answer questions with the help of a library.\n{words.text(150)}"
    library = words.texts(8, 70)
    items = [
        {
            "instructions": head,
            "question": words.text(16),
            "first": words.random.sample(library, 2),
            "second": words.random.sample(library, 2),
        }
        for _ in range(size.count(10))
    ]
    return Workload("rag", "DSPy-like RAG: two rounds of query and passages, then an answer", pipeline, items)


def several_documents(words: Words, size: Size) -> Workload:
    head = f"Answer from these documents alone. {words.text(60)}"
    items = []
    for _ in range(size.count(3)):
        documents = words.texts(3, 180)
        items += [{"instructions": head, "documents": documents, "question": words.text(16)} for _ in range(6)]
    words.random.shuffle(items)
    return Workload("multi-document", "questions on sets of three documents", read, items)
