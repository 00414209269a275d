"""The plots of the stories, as sentence patterns. Slots: hero, name, trait, place, helper, friend, thing, skill, season."""

# ruff: noqa: E501  (patterns stay on one line)
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """`beats` are told in order; the first sets the trouble and the last two resolve it, so that a
    short story can go from the second to `summary_end`. `friend` is the name of the helper."""

    name: str
    beats: tuple[str, ...]
    endings: tuple[str, ...]
    summary: str
    summary_end: str
    moral: str


OPENINGS = (
    "Once upon a time there was {a trait} {hero} named {name} who lived {place}.",
    "Once upon a time, {place}, there lived {a trait} {hero} called {name}.",
    "{A trait} {hero} named {name} lived {place}.",
    "There was once {a hero} called {name}, who lived {place} and was very {trait}.",
    "Long ago, {a trait} {hero} named {name} lived {place}.",
    "Long ago, {place}, there lived {a trait} {hero} named {name}.",
    "{Name} was {a trait} {hero} who lived {place}.",
    "Not so long ago, {place}, {a trait} {hero} named {name} [woke up early|looked out at the morning|was thinking about the day].",
)
ENDINGS = (
    "And from that day on, {name} and {friend} were the best of friends.",
    "That night {name} slept [deeply|well|without a worry], and the stars shone over the roof.",
    "And they lived happily ever after.",
    "If you ever pass by, you may still hear {name} and {friend} laugh.",
    "And whenever {name} told this story, everyone listened to the very end.",
    "{Name} smiled, because it had been a good day.",
)

PLOTS = (
    Plot(
        "lost thing",
        (
            "[One morning|One day|One {season} evening], {name} could not find the {thing} [that had been a gift from a dear friend|that {name} loved more than anything].",
            "{Name} looked [under the bed, behind the door and in every pocket|in every corner, high and low], but the {thing} was gone.",
            "[On the way|Outside], {name} met {a helper} called {friend}. \"Have you seen my {thing}?\" asked {name}.",
            "\"[Not yet|No|I have not],\" said {friend}, \"but [two can search better than one|four eyes see more than two|I will help you look].\"",
            "Together they [followed the path to the river|walked back the way {name} had come|asked everyone they met].",
            "At last {friend} saw something [shine|glitter|move] [in the grass|between two stones|under a bush].",
            "It was the {thing}! {Name} [jumped for joy|laughed out loud|was so happy that the whole place seemed brighter].",
        ),
        ("{Name} thanked {friend} with [a warm cup of tea|a big hug|a song].", "After that, {name} always put the {thing} in a safe place."),
        "{Name} the {hero} lost the {thing}, and the {helper} {friend} helped to find it again.",
        "{A helper} named {friend} helped to look, and together they found it.",
        "[Searching together is easier than searching alone.|A friend who helps is worth more than a treasure.]",
    ),
    Plot(
        "learning",
        (
            "More than anything, {name} wanted to learn to {skill}.",
            "The first try went wrong, and [everybody laughed|it ended with a bump|nothing worked at all].",
            "\"I will never learn it,\" [sighed|said] {name}.",
            "{A helper} named {friend} [sat down beside {name}|had watched it all]. \"Nobody can {skill} on the first day,\" said {friend}.",
            "So they practised [every morning|after lunch|every evening], a little more each time.",
            "After [a week|many days|a whole month], something had changed: it was no longer so hard.",
            "On the day of the [spring|summer|village] festival, {name} could {skill} [better than anyone had expected|so well that everyone clapped].",
        ),
        ("\"You see,\" said {friend}, \"[practice is a kind of magic|patience has paid off].\"", "{Name} was proud, and began to teach the others."),
        "{Name} the {hero} wanted to learn to {skill}, practised with the {helper} {friend}, and succeeded in the end.",
        "{A helper} named {friend} practised with {name} every day until it worked.",
        "[Practice makes hard things easy.|Do not give up after the first try.]",
    ),
    Plot(
        "new friend",
        (
            "{Name} had [a warm home and enough to eat|everything one could wish for], but no one to talk to.",
            "[One {season} morning|One day], {name} heard someone [crying|humming a sad song|sighing] behind a [bush|wall|rock].",
            "It was {a helper} called {friend}, who had [lost the way|fallen from a cart|missed the last boat].",
            "\"Do not be sad,\" said {name}. \"You can [rest here|stay with me tonight|share my supper].\"",
            "They [ate soup and told each other stories|talked until the moon was high|played games until late].",
            "In the morning {name} showed {friend} the way home, but {friend} [did not want to leave|came back the next day].",
            "\"Home is where a friend is,\" said {friend}, and {name} [nodded|felt warm inside].",
        ),
        ("Since then they have had breakfast together every day.", "{Name} was never lonely again."),
        "{Name} the {hero} was lonely, helped the {helper} {friend}, and found a friend.",
        "One day {name} helped {a helper} named {friend}, and the two became friends.",
        "[Kindness to a stranger can turn into a friendship.|Whoever helps others will not be alone.]",
    ),
    Plot(
        "storm",
        (
            "One {season} night a great storm came. The wind [howled|roared] and the rain [fell like a river|beat against the windows].",
            "{Name} heard a voice calling for help from [the other side of the river|the dark road|the old bridge].",
            "{Name} was afraid, but took a lantern and went out.",
            "There was {a helper} named {friend}, [holding on to a branch|trapped under a fallen tree|shaking with cold].",
            "\"Hold on!\" called {name}, and [threw a rope|held out a long stick|pulled with all strength].",
            "It took a long time, but at last {friend} was safe.",
            "They ran home and [sat by the fire|drank hot milk|wrapped themselves in blankets] until the storm was over.",
        ),
        ("In the morning the sun came out, and everyone heard how brave {name} had been.", "\"You were brave,\" said {friend}. \"I was afraid,\" said {name}, \"but I came.\""),
        "On a stormy night {name} the {hero} went out and saved the {helper} {friend}.",
        "In a storm {name} saved {a helper} named {friend} and was called brave by all.",
        "[To be brave is to be afraid and to help all the same.|Courage is shown when others need help.]",
    ),
    Plot(
        "sharing",
        (
            "It was a hard {season}, and there was little to eat. {Name} had only [one loaf of bread|a small bag of nuts|three apples] left.",
            "Then {a helper} called {friend} knocked at the door and said, \"[I am so hungry|I have not eaten for two days].\"",
            "{Name} looked at the food and thought for a while.",
            "\"Come in,\" said {name} at last. \"Half of it is yours.\"",
            "They ate together, and although it was little, it [tasted better than a feast|was enough for both].",
            "The next day {friend} came back with [a basket full of berries|a pot of honey|seeds for a whole garden].",
            "\"You shared when you had little,\" said {friend}. \"Now let me share with you.\"",
        ),
        ("That {season} nobody in the neighbourhood went hungry.", "{Name} had learned that sharing makes little into enough."),
        "{Name} the {hero} shared the last food with the {helper} {friend}, who later gave much more back.",
        "{Name} shared the last food with {a helper} named {friend}, who came back with much more.",
        "[Sharing makes little into enough.|What you give away with a good heart comes back to you.]",
    ),
    Plot(
        "darkness",
        (
            "{Name} had one secret: {name} was afraid of the dark.",
            "When the sun went down, every shadow looked like [a monster|a wolf|a giant hand].",
            "One evening the {helper} {friend} came by and asked, \"Why do you never come out at night?\"",
            "{Name} [looked at the floor|whispered the secret], and {friend} did not laugh.",
            "\"Come with me,\" said {friend}, \"I will show you something that can only be seen in the dark.\"",
            "Hand in hand they walked up the hill, and {name} [kept both eyes shut|counted every step].",
            "\"Now look,\" said {friend}. Above them were [a thousand stars|more stars than anyone could count], and {name} [forgot to be afraid|thought it was the most beautiful thing in the world].",
        ),
        ("Since then {name} has waited for the night with joy.", "\"The dark is only the place where the stars live,\" said {name}."),
        "{Name} the {hero} was afraid of the dark until the {helper} {friend} showed the stars.",
        "{A helper} named {friend} showed {name} the stars, and the fear was gone.",
        "[What we fear can hold something beautiful.|With a friend, even the dark is less dark.]",
    ),
    Plot(
        "race",
        (
            "Every {season} there was a great race, and this year {name} wanted to win it.",
            "\"You?\" laughed the others. \"You are far too [slow|small|young]!\"",
            "When the race began, everyone ran ahead, and {name} was the last.",
            "Halfway, {name} saw {a helper} called {friend} lying by the road with a hurt foot.",
            "The others had [run past|not even looked]. {Name} stopped, and [carried {friend}|helped {friend} to walk].",
            "They came to the finish long after everyone else, when [the sun was setting|the music had ended].",
            "But the judge stood up and gave {name} the {thing}. \"[The fastest has won the race|Others were faster],\" said the judge, \"but you have won our hearts.\"",
        ),
        ("Nobody ever laughed at {name} again.", "{Friend} cheered the loudest of all."),
        "{Name} the {hero} stopped in a race to help the {helper} {friend} and was honoured for it.",
        "In a great race {name} stopped to help {a helper} named {friend}, and won the hearts of all.",
        "[Helping is worth more than winning.|It matters more how you run than how fast.]",
    ),
    Plot(
        "garden",
        (
            "One {season} {name} found a tiny seed and planted it [in front of the door|in a pot|on the sunny side of the house].",
            "{Name} watered it every day, but nothing happened.",
            "\"It is a bad seed,\" said {name} after [a week|ten days]. \"I will dig it up.\"",
            "\"Wait,\" said {a helper} named {friend}. \"[Good things grow slowly|A seed works where you cannot see it].\"",
            "So {name} waited, through rain and sun, and [sang to the earth|told the seed a story every night].",
            "One morning there was a small green [leaf|tip] above the ground.",
            "By the end of the year it had become [a tree full of apples|the most beautiful flower of the land|a vine with sweet grapes], and all the neighbours came to see it.",
        ),
        ("{Name} gave a seed to everyone who came.", "\"I only had to wait,\" said {name}. \"And to water,\" said {friend}."),
        "{Name} the {hero} planted a seed, wanted to give up, and was rewarded for waiting.",
        "{A helper} named {friend} told {name} to be patient, and the seed became a wonder.",
        "[Patience lets good things grow.|Good things need time.]",
    ),
    Plot(
        "journey",
        (
            "{Name} had never been further than the next [hill|bridge|field], but dreamed of seeing the [sea|big city|high mountains].",
            "One {season} day {name} packed a [small bag|loaf of bread and a bottle of water] and the {thing}, and set off.",
            "The road was long. It went [through a forest|over three hills|along a river], and the nights were cold.",
            "At a crossing sat {a helper} called {friend}, who was going the same way. \"Let us walk together,\" said {friend}.",
            "They told each other stories, and the miles went by faster.",
            "[When {name} was tired, {friend} sang.|When {friend} was tired, {name} told a joke.]",
            "On the seventh day they stood [on top of the last hill|at the end of the road] and looked. \"It is [bigger|more beautiful] than in my dream,\" said {name}.",
        ),
        ("They stayed [a whole week|three days], and then walked home with much to tell.", "\"The best part,\" said {name}, \"was the way here with you.\""),
        "{Name} the {hero} went on a long journey, met the {helper} {friend}, and saw the dream come true.",
        "On a long journey {name} met {a helper} named {friend}, and together they saw the world.",
        "[A long way is shorter with a friend.|The journey can be better than the goal.]",
    ),
    Plot(
        "truth",
        (
            "One day {name} broke the {thing} of the {helper} {friend} [while playing|by accident].",
            "Nobody had seen it. {Name} [hid the pieces under a stone|ran home quickly|pretended to know nothing].",
            "But that night {name} could not sleep. The heart was heavy like a [stone|bag of sand].",
            "In the morning {friend} was looking everywhere for the {thing}.",
            "{Name} took a deep breath and said, \"It was me. I broke it, and I am sorry.\"",
            "{Friend} was quiet for a moment. Then {friend} said, \"I am sad about it, but I am glad that you told me.\"",
            "Together they [glued the pieces|mended it], and it was [almost as good as new|even dearer to them than before].",
        ),
        ("{Name} felt as light as a feather.", "From then on {name} always told the truth, even when it was hard."),
        "{Name} the {hero} broke the {thing} of the {helper} {friend}, told the truth, and was forgiven.",
        "It was not easy, but {name} told {a helper} named {friend} the truth about a mistake and was forgiven.",
        "[Telling the truth makes the heart light.|It is better to tell the truth than to hide a mistake.]",
    ),
    Plot(
        "mystery",
        (
            "One {season} night {name} heard a strange sound: [tap, tap, tap|a soft ringing|a low humming]. It came from [the roof|the cellar|behind the wall].",
            "The next night it came again, and nobody knew what it was.",
            "{Name} asked the {helper} {friend}, who knew [many things|every corner of the place].",
            "\"Let us find out,\" said {friend}, and they [waited in the dark|took a candle|climbed up quietly].",
            "They found footprints of [flour|dust|mud], and followed them step by step.",
            "Behind an old door sat [a tiny kitten|a young bird|a little mouse], playing with the {thing}.",
            "\"So you are our ghost!\" laughed {name}, and the mystery was solved.",
        ),
        ("They kept the little visitor, and named it [Echo|Pepper|Button].", "After that the nights were quiet, and sometimes {name} almost missed the sound."),
        "{Name} the {hero} heard a strange sound at night, and with the {helper} {friend} found out what it was.",
        "With {a helper} named {friend}, {name} found out what made a strange sound at night.",
        "[Most mysteries are less frightening when you look closely.|Look before you fear.]",
    ),
    Plot(
        "gift",
        (
            "The birthday of the {helper} {friend} was near, and {name} had no money for a gift.",
            "{Name} thought about it [all day|for three days]. Should it be flowers? A cake? A song?",
            "In the attic {name} found only the {thing}, which was old and [broken|covered with dust].",
            "{Name} cleaned it, [repaired|polished|painted] it and worked until late at night.",
            "On the day of the party there were many big and shining gifts, and {name} [wanted to hide|held the small parcel behind the back].",
            "{Friend} opened the small parcel last and became very quiet.",
            "\"You made this with your own hands,\" said {friend}. \"It is the best gift of all.\"",
        ),
        ("The {thing} still stands on the best shelf of {friend}.", "They danced and ate cake until midnight."),
        "{Name} the {hero} had no money, so {name} repaired the {thing} as a gift for the {helper} {friend}.",
        "With the {thing}, made beautiful by hand, {name} gave {a helper} named {friend} the best gift of all.",
        "[The best gifts are made with love.|A gift is worth the care that is in it.]",
    ),
)  # fmt: skip
