"""Reference in plain Python for n-gram indices and dynamic trees, one token and node at a time."""

import numpy as np

TOP = 8
LONGEST = 6
ALONE = -2


def cell(tokens, cells):
    """The cell of an n-gram in a table of `cells`."""
    value = len(tokens)
    for token in tokens:
        value = ((value ^ (token % 2**32)) * 0x9E3779B1) % 2**32
        value ^= value >> 15
    return value % cells


class PlainText:
    """A text of at most `length` tokens and its n-gram index of `cells` cells."""

    def __init__(self, length, cells):
        self.length, self.cells = length, cells
        self.tokens, self.index = [], {}

    def extend(self, tokens):
        for token in tokens:
            if token < 0 or len(self.tokens) == self.length:
                continue
            end = len(self.tokens)
            for n in range(1, min(LONGEST, end) + 1):
                self.index[cell(self.tokens[end - n :], self.cells)] = end
            self.tokens.append(token)

    def match(self, path):
        """The token that followed the longest match of a suffix of `path`, and the match's length.

        Without a match, -1 and 0.
        """
        for n in range(min(LONGEST, len(path)), 0, -1):
            gram = path[-n:]
            place = self.index.get(cell(gram, self.cells), -1)
            if place >= n and self.tokens[place - n : place] == gram:
                return self.tokens[place], n
        return -1, 0


def offered(matrix, bigrams, text, path):
    """The candidates after a path with their sources, in the order of `find_candidates`."""
    match, matched = text.match(path)
    row = matrix[path[-1]] if 0 <= path[-1] < len(matrix) else []
    own = bigrams[cell([ALONE, path[-1]], len(bigrams))]
    if own[:2] == [ALONE, path[-1]]:
        row = own[2:]
    bigram = bigrams[cell(path[-2:], len(bigrams))] if len(path) > 1 else [-1]
    has_bigram = bigram[:2] == path[-2:]
    likely = bigram[2:] if has_bigram else []
    found = {}
    for token in [match, *likely, *row]:
        if token < 0 or token in found:
            continue
        state = 0 if not matched else matched if token == match else LONGEST + matched
        in_bigram = (likely.index(token) + 1 if token in likely else 0) if has_bigram else TOP + 1
        in_row = row.index(token) + 1 if token in row else 0
        found[token] = (state * (TOP + 2) + in_bigram) * (TOP + 1) + in_row
    return found


def expanded(matrix, bigrams, text, priors, root, width, depth):
    """The columns of a tree in order, each as (token, parent, source, score)."""
    nothing = (-1, -1, 0, 0.0)
    columns, first = [(root, -1, 0, 1.0)], 0
    paths = [[*text.tokens[:-1], root]]
    for level in range(depth):
        children = []
        for column in range(first, len(columns)):
            if columns[column] == nothing:
                continue
            best = []
            for token, source in offered(matrix, bigrams, text, paths[column]).items():
                score = np.float32(columns[column][3]) * np.float32(priors[source])
                if score > 0:
                    best.append((token, column, source, float(score)))
            children += sorted(best, key=lambda child: -child[3])[:TOP]
        order = sorted(range(len(children)), key=lambda i: (-children[i][3], i))[:width]
        first = len(columns)
        for i in sorted(order):
            columns.append(children[i])
            paths.append([*paths[children[i][1]], children[i][0]])
        room = min(TOP, width) if level == 0 else width
        while len(columns) < first + room:
            columns.append(nothing)
            paths.append(None)
    return columns


def best_nodes(columns, num_draft_tokens):
    """The selected nodes in order, each as (token, parent, source)."""
    there = [i for i in range(1, len(columns)) if columns[i][3] > 0]
    best = [0, *sorted(sorted(there, key=lambda i: (-columns[i][3], i))[:num_draft_tokens])]
    return [(columns[i][0], best.index(columns[i][1]) if i else -1, columns[i][2]) for i in best]
