"""Reference in plain Python for texts, the memory and dynamic trees, one token at a time."""

from bisect import bisect_right

import numpy as np

TOP = 8
LONGEST = 6
AT_ROOT = 16
MEMORY_NGRAMS = (4, 8, 16)
MAX_MATCH = 64
ALONE = -2
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 10, 15, 23, 37)
BUCKETS = len(LENGTHS)
LEAST_PARENT = 1 / 1024
MIN_SCORE = np.float32(0.2)
CAP = np.float32(0.9999)


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
            for n in (*range(1, LONGEST + 1), AT_ROOT):
                if n <= end:
                    self.index[cell(self.tokens[end - n :], self.cells)] = end
            self.tokens.append(token)

    def place_of(self, gram):
        """The place after the last occurrence of an n-gram; None if the index lacks it."""
        place = self.index.get(cell(gram, self.cells), 0)
        return place if self.tokens[max(place - len(gram), 0) : place] == gram else None


class PlainMemory:
    """A ring of `places` tokens with an index of `cells` cells for each length of n-grams."""

    def __init__(self, places, cells):
        self.places, self.cells = places, cells
        self.tokens, self.end = [-1] * places, 0
        self.index = [{} for _ in MEMORY_NGRAMS]

    def append(self, text):
        text = text[max(0, len(text) - self.places + 1) :]
        for at, token in enumerate(text):
            for n, index in zip(MEMORY_NGRAMS, self.index, strict=True):
                if at >= n:
                    index[cell(text[at - n : at], self.cells)] = self.end
            self.tokens[self.end % self.places] = token
            self.end += 1
        if text:
            self.tokens[self.end % self.places] = -1
            self.end += 1


def common_suffix(one, other):
    """The number of tokens, up to MAX_MATCH, in which two texts end alike."""
    length = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b or length == MAX_MATCH:
            break
        length += 1
    return length


def root_matches(text, memory):
    """The place and length of the longest match in the text, and in the memory."""
    own, remembered = (0, 0), (0, 0)
    for n in (*range(1, LONGEST + 1), AT_ROOT):
        if n > len(text.tokens):
            continue
        place = text.index.get(cell(text.tokens[-n:], text.cells), 0)
        length = common_suffix(text.tokens, text.tokens[:place])
        if length and length >= own[1]:
            own = place, length
    for n, index in zip(MEMORY_NGRAMS, memory.index, strict=True):
        if n > len(text.tokens):
            continue
        position = index.get(cell(text.tokens[-n:], memory.cells), 0)
        before = [memory.tokens[p % memory.places] for p in range(max(position - 70, 0), position)]
        length = common_suffix(text.tokens, before)
        if length >= MEMORY_NGRAMS[0] and length >= remembered[1]:
            remembered = position % memory.places, length
    return own, remembered


def bucket(length):
    return bisect_right(LENGTHS, length) - 1


def text_place(place, end, depth):
    """A place in the text with the token at `place`, which may be in the draft behind it."""
    period = max(end + depth - place, 1)
    while place >= end:
        place -= period
    return place


def copies_of(text, memory, path, depth, own, remembered):
    """The copies after a path: `(token, state, own match)`, longest match first.

    Also the state of other candidates, and the token that follows in the memory.
    """
    found = []
    for n in range(1, min(LONGEST, len(path)) + 1):
        place = text.place_of(path[-n:])
        if place is not None:
            found.append((n, 2, place))
    if own[1] and text_place(own[0], len(text.tokens), depth) >= 0:
        found.append((own[1], 1, own[0]))
    follows = memory.tokens[remembered[0]] if remembered[1] else -1
    if follows >= 0:
        found.append((remembered[1], 0, None))
    copies, rest = [], 0
    for length, _, place in sorted(found, reverse=True, key=lambda match: match[:2]):
        token = follows
        if place is not None:
            token = text.tokens[text_place(place, len(text.tokens), depth)]
        known = [copy for copy in copies if copy[0] == token]
        if not known and len(copies) == 3:
            continue
        if not known:
            state = 1 + bucket(length) + (BUCKETS if place is None else 0)
            if not copies:
                rest = state + 4 * BUCKETS
            copies.append([token, state + (2 * BUCKETS if copies else 0), (0, 0)])
            known = copies[-1:]
        if place is not None and known[0][2] == (0, 0):
            known[0][2] = place, length
    return copies, rest, follows


def rows_of(tables, path):
    """The row of a path's last two tokens, None if there is none, and the row of its last token."""
    matrix, bigrams, own = tables
    row = matrix[path[-1]] if 0 <= path[-1] < len(matrix) else []
    mine = own[cell([ALONE, path[-1]], len(own))]
    if mine[:2] == [ALONE, path[-1]]:
        row = mine[2:]
    for table in (own, bigrams):
        bigram = table[cell(path[-2:], len(table))] if len(path) > 1 else [-1]
        if bigram[:2] == path[-2:]:
            return bigram[2:], row
    return None, row


def source_of(rows, state, token):
    likely, row = rows
    in_bigram = TOP + 1 if likely is None else likely.index(token) + 1 if token in likely else 0
    in_row = row.index(token) + 1 if token in row else 0
    return (state * (TOP + 2) + in_bigram) * (TOP + 1) + in_row


def offered(tables, path, copies, rest):
    """The candidates after a path with their sources, in the order of `find_candidates`."""
    rows = rows_of(tables, path)
    states = {token: state for token, state, _ in copies}
    found = {}
    for token in [*states, *(rows[0] or []), *rows[1]]:
        if token >= 0 and token not in found:
            found[token] = source_of(rows, states.get(token, rest), token)
    return found


def step_on(match, places=None):
    """The match of one more token; a place in a ring wraps around."""
    place = match[0] + 1 if places is None else (match[0] + 1) % places
    return place, min(match[1] + 1, MAX_MATCH)


def expanded(tables, text, memory, priors, root, width, depth, spine=0):
    """The columns of a tree in order, each as (token, parent, source, score)."""
    nothing = (-1, -1, 0, 0.0)
    columns, first = [(root, -1, 0, 1.0)], 0
    paths = [[*text.tokens[:-1], root]]
    matches = [root_matches(text, memory)]
    for level in range(depth):
        children = []
        for column in range(first, len(columns)):
            if columns[column] == nothing or columns[column][3] < LEAST_PARENT:
                continue
            own, remembered = matches[column]
            copies, rest, follows = copies_of(text, memory, paths[column], level, own, remembered)
            best = []
            for token, source in offered(tables, paths[column], copies, rest).items():
                score = np.float32(columns[column][3]) * np.float32(priors[source])
                if score > 0:
                    copied = [copy[2] for copy in copies if copy[0] == token and copy[2][1]]
                    match = (
                        step_on(copied[0]) if copied else (0, 0),
                        step_on(remembered, memory.places) if token == follows else (0, 0),
                    )
                    best.append((token, column, source, float(score), match))
            children += sorted(best, key=lambda child: -child[3])[:TOP]
        order = sorted(range(len(children)), key=lambda i: (-children[i][3], i))[:width]
        first = len(columns)
        for i in sorted(order):
            columns.append(children[i][:4])
            paths.append([*paths[children[i][1]], children[i][0]])
            matches.append(children[i][4])
        room = min(TOP, width) if level == 0 else width
        while len(columns) < first + room:
            columns.append(nothing)
            paths.append(None)
            matches.append(((0, 0), (0, 0)))
    following = [at for at in range(first, len(columns)) if matches[at][0][1] or matches[at][1][1]]
    if spine and following:
        at = max(following, key=lambda column: columns[column][3])
        columns += chain(tables, text, memory, priors, paths[at], at, columns, matches[at], spine)
    return columns + [nothing] * (len(paths) + spine - len(columns))


def chain(tables, text, memory, priors, path, at, columns, match, spine):
    """The nodes of a spine below column `at`."""
    nodes, score, depth = [], np.float32(columns[at][3]), len(path) - len(text.tokens)
    (own, own_length), (remembered, length) = match
    is_own = own_length >= length
    length = max(own_length, length)
    for step in range(spine):
        if is_own:
            place = text_place(own + step, len(text.tokens), depth + step)
            token = text.tokens[place] if place >= 0 else -1
        else:
            token = memory.tokens[(remembered + step) % memory.places]
        if token < 0:
            break
        state = 1 + bucket(min(length + step, MAX_MATCH)) + (0 if is_own else BUCKETS)
        source = source_of(rows_of(tables, path), state, token)
        score *= min(np.float32(priors[source]), CAP)
        if score < MIN_SCORE:
            break
        nodes.append((token, len(columns) + step - 1 if step else at, source, float(score)))
        path = [*path, token]
    return nodes


def best_nodes(columns, num_draft_tokens, spine=0, min_score=0.0, by_score=False):
    """The selected nodes in order, each as (token, parent, source)."""
    there = [i for i in range(1, len(columns)) if columns[i][3] > 0]
    ranked = sorted(there, key=lambda i: (-columns[i][3], i))
    more = [i for i in ranked[num_draft_tokens:] if columns[i][3] >= min_score][:spine]
    best = [*ranked[:num_draft_tokens], *more]
    best = [0, *(best if by_score else sorted(best))]
    return [(columns[i][0], best.index(columns[i][1]) if i else -1, columns[i][2]) for i in best]
