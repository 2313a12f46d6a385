"""Prose in many languages, of several hundred bytes each: the first article of the Universal Declaration of Human Rights,
and a story of a mill."""

from __future__ import annotations

SENTENCES = {
    "Russian": (
        "Все люди рождаются свободными и равными в своём достоинстве и правах. Они наделены разумом и совестью и должны "
        "поступать в отношении друг друга в духе братства.\nСтарая мельница стояла у реки и уже много лет не работала. Дети "
        "часто приходили туда ловить рыбу, а вечером, когда становилось темно, бежали домой через поле. Никто не знал, "
        "кому она принадлежит и почему её хозяин однажды уехал и не вернулся.\n"
    ),
    "Ukrainian": (
        "Всі люди народжуються вільними і рівними у своїй гідності та правах. Вони наділені розумом і совістю і повинні "
        "діяти у відношенні один до одного в дусі братерства.\nСтарий млин стояв біля річки і вже багато років не працював. "
        "Діти часто приходили туди ловити рибу, а ввечері, коли ставало темно, бігли додому через поле. Їхній дід казав, "
        "що його ґазда поїхав за море.\n"
    ),
    "Greek": (
        "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα. Είναι προικισμένοι με λογική "
        "και συνείδηση, και οφείλουν να συμπεριφέρονται μεταξύ τους με πνεύμα αδελφοσύνης.\nΟ παλιός μύλος βρισκόταν κοντά "
        "στο ποτάμι και δεν δούλευε εδώ και πολλά χρόνια. Τα παιδιά πήγαιναν συχνά εκεί για να ψαρέψουν, και το βράδυ, όταν "
        "σκοτείνιαζε, έτρεχαν στο σπίτι μέσα από τα χωράφια.\n"
    ),
    "Arabic": (
        "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق، وقد وهبوا عقلا وضميرا وعليهم أن يعامل بعضهم بعضا بروح الإخاء.\n"
        "كانت الطاحونة القديمة قرب النهر ولم تعمل منذ سنوات طويلة. وكان الأطفال يذهبون إلى هناك لصيد السمك، وفي المساء عندما "
        "يحل الظلام يركضون إلى البيت عبر الحقول. لم يعرف أحد من هو صاحبها ولماذا سافر ذات يوم ولم يرجع.\n"
    ),
    "Hebrew": (
        "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם. כולם חוננו בתבונה ובמצפון, לפיכך חובה עליהם לנהוג איש ברעהו "
        "ברוח של אחווה.\nהטחנה הישנה עמדה ליד הנהר וכבר שנים רבות לא פעלה. הילדים הלכו לשם לעתים קרובות כדי לדוג דגים, "
        "ובערב, כשהחשיך, רצו הביתה דרך השדות. איש לא ידע למי היא שייכת ומדוע בעליה נסע יום אחד ולא חזר.\n"
    ),
    "Thai": (
        "มนุษย์ทั้งปวงเกิดมามีอิสระและเสมอภาคกันในศักดิ์ศรีและสิทธิ ต่างในตนมีเหตุผลและมโนธรรม "
        "และควรปฏิบัติต่อกันด้วยจิตวิญญาณแห่งภราดรภาพ\nโรงสีเก่าตั้งอยู่ริมแม่น้ำและไม่ได้ทำงานมาหลายปีแล้ว "
        "เด็กๆ มักไปที่นั่นเพื่อจับปลา และในตอนเย็นเมื่อฟ้ามืดพวกเขาก็วิ่งกลับบ้านผ่านทุ่งนา "
        "ไม่มีใครรู้ว่าใครเป็นเจ้าของและทำไมเจ้าของจึงจากไปวันหนึ่งแล้วไม่กลับมาอีก\n"
    ),
    "Japanese": (
        "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。人間は、理性と良心とを授けられており、"
        "互いに同胞の精神をもって行動しなければならない。\n古い水車小屋は川のそばに立っていて、もう何年も動いていなかった。子供たちは"
        "よくそこへ魚を釣りに行き、夕方になって暗くなると、畑を通って家へ走って帰った。コンピューターやテレビはまだなかった。"
        "持ち主がだれなのか、なぜある日出かけたまま戻らなかったのか、知っている者はいなかった。\n"
    ),
    "Korean": (
        "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로 이성과 양심을 부여받았으며 서로 "
        "형제애의 정신으로 행동하여야 한다.\n오래된 방앗간은 강가에 서 있었고 벌써 여러 해 동안 돌아가지 않았다. 아이들은 자주 그곳에 "
        "물고기를 잡으러 갔고, 저녁에 어두워지면 밭을 지나 집으로 뛰어갔다. 주인이 누구인지, 왜 어느 날 떠나서 돌아오지 않았는지 아는 "
        "사람은 아무도 없었다.\n"
    ),
    "Chinese": (
        "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。\n老磨坊在河边，已经许多年没有"
        "工作了。孩子们常常到那里去钓鱼，晚上天黑的时候，就穿过田野跑回家。没有人知道它是谁的，也没有人知道它的主人为什么有一天离开了，"
        "再也没有回来。村里的老人说，他去了很远的地方，在海的那一边，那里的人说另一种语言。\n"
    ),
    "Taiwanese": (
        "人人生而自由，在尊嚴和權利上一律平等。他們賦有理性和良心，並應以兄弟關係的精神相對待。\n老磨坊在河邊，已經許多年沒有"
        "工作了。孩子們常常到那裡去釣魚，晚上天黑的時候，就穿過田野跑回家。沒有人知道它是誰的，也沒有人知道它的主人為什麼有一天離開了，"
        "再也沒有回來。村裡的老人說，他去了很遠的地方，在海的那一邊，那裡的人說另一種語言。\n"
    ),
    "French": (
        "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de conscience et "
        "doivent agir les uns envers les autres dans un esprit de fraternité.\nLe vieux moulin était situé près de la rivière et "
        "ne marchait plus depuis des années. Les enfants y allaient souvent pêcher ; le soir, à la nuit tombée, ils rentraient "
        "chez eux à travers champs. « Où est-il passé ? » demandait-on çà et là.\n"
    ),
    "German": (
        "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt und sollen "
        "einander im Geiste der Brüderlichkeit begegnen.\nDie alte Mühle stand am Fluss und war schon seit vielen Jahren nicht "
        "mehr in Betrieb. Die Kinder gingen oft dorthin, um Fische zu fangen, und abends, wenn es dunkel wurde, liefen sie über "
        "die Felder nach Hause. Niemand wusste, wem sie gehörte und weshalb ihr Besitzer eines Tages auf großer Fahrt blieb.\n"
    ),
    "Spanish": (
        "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón y conciencia, deben "
        "comportarse fraternalmente los unos con los otros.\nEl viejo molino estaba cerca del río y hacía muchos años que no "
        "funcionaba. Los niños iban allí a pescar; ¿quién podía decirles que no? ¡Nadie! Al anochecer corrían a casa a través de "
        "los campos. Mañana será otro día.\n"
    ),
    "Portuguese": (
        "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão e de consciência, devem agir "
        "uns para com os outros em espírito de fraternidade.\nO velho moinho ficava perto do rio e há muitos anos que não "
        "funcionava. As crianças iam lá pescar e, à noite, quando escurecia, corriam para casa através dos campos. Ninguém sabia "
        "de quem era, nem por que razão o dono partira um dia e não voltara.\n"
    ),
    "Swedish": (
        "Alla människor är födda fria och lika i värde och rättigheter. De är utrustade med förnuft och samvete och bör handla "
        "gentemot varandra i en anda av broderskap.\nDen gamla kvarnen låg vid ån och hade inte varit i gång på många år. Barnen "
        "gick ofta dit för att fiska, och på kvällen, när det blev mörkt, sprang de hem över åkrarna. Ingen visste vem som ägde "
        "den och varför han en dag hade rest bort.\n"
    ),
    "Polish": (
        "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Są oni obdarzeni rozumem i sumieniem i "
        "powinni postępować wobec innych w duchu braterstwa.\nW pobliżu rzeki stał stary młyn, który od wielu lat nie pracował. "
        "Dzieci często przychodziły tam łowić ryby, a wieczorem, gdy robiło się ciemno, biegły przez pola do domu. Nikt nie "
        "wiedział, czyj był i dlaczego jego właściciel pewnego dnia wyjechał i już nie wrócił.\n"
    ),
    "Czech": (
        "Všichni lidé rodí se svobodní a sobě rovní co do důstojnosti a práv. Jsou nadáni rozumem a svědomím a mají spolu jednat "
        "v duchu bratrství.\nStarý mlýn stál u řeky a už mnoho let nepracoval. Děti tam často chodily chytat ryby a večer, když se "
        "setmělo, běžely přes pole domů. Nikdo nevěděl, komu patří a proč jeho majitel jednoho dne odjel a už se nevrátil. Říkalo "
        "se, že šel za moře.\n"
    ),
    "Hungarian": (
        "Minden emberi lény szabadon születik és egyenlő méltósága és joga van. Az emberek, ésszel és lelkiismerettel bírván, "
        "egymással szemben testvéri szellemben kell hogy viseltessenek.\nA régi malom a folyó mellett állt, és már évek óta nem "
        "működött. A gyerekek gyakran jártak oda halat fogni, este pedig, amikor besötétedett, a mezőkön át futottak haza. Senki "
        "sem tudta, kié volt, és miért ment el egy nap a gazdája, hogy többé vissza se térjen. Hűvös őszi szél fújt.\n"
    ),
    "Turkish": (
        "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. Akıl ve vicdana sahiptirler ve birbirlerine karşı "
        "kardeşlik zihniyeti ile hareket etmelidirler.\nEski değirmen nehrin kıyısında duruyordu ve uzun yıllardır çalışmıyordu. "
        "Çocuklar oraya sık sık balık tutmaya gider, akşam hava kararınca tarlalardan geçip eve koşarlardı. Kimin olduğunu ve "
        "sahibinin bir gün neden gidip dönmediğini kimse bilmiyordu. İşte böyle.\n"
    ),
}
ENCODINGS = {
    "Russian": "koi8-r cp1251 cp866 iso8859-5 mac-cyrillic",
    "Ukrainian": "cp1251 koi8-u",
    "Greek": "iso8859-7 cp1253 cp737 mac-greek",
    "Arabic": "cp1256 iso8859-6",
    "Hebrew": "cp1255 iso8859-8",
    "Thai": "tis-620 cp874",
    "Japanese": "cp932 euc-jp iso2022-jp",
    "Korean": "cp949 euc-kr johab iso2022-kr",
    "Chinese": "gb18030 gb2312 gbk",
    "Taiwanese": "big5 cp950",
    "French": "cp1252 latin-1 iso8859-15 cp850 mac-roman",
    "German": "cp1252 latin-1 cp850 cp437",
    "Spanish": "cp1252 latin-1 cp850",
    "Portuguese": "cp1252 latin-1 cp850",
    "Swedish": "cp1252 latin-1 cp850",
    "Polish": "cp1250 iso8859-2 cp852",
    "Czech": "cp1250 iso8859-2 cp852",
    "Hungarian": "cp1250 iso8859-2",
    "Turkish": "cp1254 iso8859-9",
}
PAIRS = [(language, encoding) for language, encodings in ENCODINGS.items() for encoding in encodings.split()]
