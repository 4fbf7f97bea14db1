//! Finds the candidate most similar to a misspelt word, by edit distance.

/// Longest word compared, in characters; the cost grows with the product of two lengths.
const WORD_CHARS_MAX: usize = 128;

/// Returns the candidate with the fewest edits from `word`, ignoring case, if they are few for its length.
pub fn nearest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let folded: Vec<char> = word.chars().take(WORD_CHARS_MAX + 1).flat_map(char::to_lowercase).collect();
    if folded.len() > WORD_CHARS_MAX {
        return None;
    }
    let allowed = 1 + folded.len() / 4;
    candidates
        .into_iter()
        .map(|candidate| (distance(&folded, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= allowed && *distance < candidate.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Counts insertions, deletions, replacements and swaps of neighbours (optimal string alignment).
fn distance(word: &[char], candidate: &str) -> usize {
    let candidate: Vec<char> = candidate.chars().take(WORD_CHARS_MAX).flat_map(char::to_lowercase).collect();
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=candidate.len()).collect();
    for (row, ours) in word.iter().enumerate() {
        let mut line = vec![row + 1];
        for (column, theirs) in candidate.iter().enumerate() {
            let replace = above[column] + usize::from(ours != theirs);
            let mut cost = replace.min(above[column + 1] + 1).min(line[column] + 1);
            let swapped = row > 0 && column > 0 && word[row - 1] == *theirs && *ours == candidate[column - 1];
            if swapped {
                cost = cost.min(before[column - 1] + 1);
            }
            line.push(cost);
        }
        before = std::mem::replace(&mut above, line);
    }
    above[candidate.len()]
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let keys = ["listen", "listeners", "routes", "bind", "to"];
        assert_eq!(nearest("lisen", keys), Some("listen"));
        assert_eq!(nearest("Listeners", keys), Some("listeners"));
        assert_eq!(nearest("bnid", keys), Some("bind"));
        assert_eq!(nearest("telemetry", keys), None);
        assert_eq!(nearest("x", keys), None);
        assert_eq!(nearest("", keys), None);
        assert_eq!(nearest(&"a".repeat(1 << 20), keys), None);
    }
}
